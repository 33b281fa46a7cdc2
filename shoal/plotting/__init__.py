"""The curves of runs, as .png, .svg or .pdf files."""
