"""Figures of runs, pipeline schedules and traces, as .png, .svg or .pdf files."""
