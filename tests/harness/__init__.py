"""The test run around pytest: its limits, what it leaves on the machine, and what it skips."""
