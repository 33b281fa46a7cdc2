"""Checks of this machine: which strategies it can run, and what is missing."""
