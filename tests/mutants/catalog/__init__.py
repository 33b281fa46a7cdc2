"""Planted bugs and harmless changes, by what they change."""
