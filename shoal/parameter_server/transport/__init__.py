"""Sockets between processes of one job: Unix sockets, TLS, frames, queued connections."""
