"""Figures of runs and pipeline schedules, as .png, .svg or .pdf files."""
