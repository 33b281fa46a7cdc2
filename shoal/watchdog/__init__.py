"""The watchdog of a run: what each rank does, read from outside, and who is late.

    rank 0   ProgressWriter ──> word ─┐                    ┌─> find_hang           a rank is late
    rank 1   ProgressWriter ──> word ─┼─> ProgressMemory ──┤
    rank 2   ProgressWriter ──> word ─┘   (the launcher)   └─> StragglerDetector   a rank is slow

progress_word.py      the phases of a run, and the memory of words, made and read by the launcher
progress_writer.py    a rank writes its word: at each phase, and at each collective
hang_detector.py      words and time in, the late rank out; no clock, no process
straggler_detector.py times of steps in, the slow rank out; no clock, no process

On several hosts each agent reads the memory of its ranks. The driver asks them for it and runs the
detectors; see `shoal.launch.hosts.remote_ranks`.

A rank does nothing for it but to write. So it is seen also while it sleeps, is stopped, or is in C
with the interpreter locked.
"""
