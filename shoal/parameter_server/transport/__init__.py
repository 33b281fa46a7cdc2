"""Sockets between processes of one job: handshake, authenticated frames, connections."""
