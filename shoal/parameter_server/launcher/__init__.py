"""Processes of servers and the coordinator: start, watch, start again."""
