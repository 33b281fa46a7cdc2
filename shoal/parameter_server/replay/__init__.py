"""The recorded order of an asynchronous run, and a run in that order again."""
