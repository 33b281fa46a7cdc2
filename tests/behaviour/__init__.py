"""Compare what Shoal does today with what it did when `recorded/` was written.

    runs.py         seeded runs in small worlds: losses, gradients, weights
    saved.py        runs that an earlier version has saved or recorded, gone on with and replayed
    interface.py    verbs, options, settings, strategies, verified cells, the public API, the wire
    quotations.py   the texts of errors that tests quote
    circumstances.py   tells where the same bits can be asked for
    record.py       writes `recorded/`; run it by hand, and commit what it writes

A record is evidence of an earlier version. Do not write it anew because a test fails: find out what
has changed. Write it anew only where numbers, names or files shall change from now on, with one
commit for the change and its record, whose message says why:

    python -m tests.behaviour.record runs            # all seeded runs
    python -m tests.behaviour.record runs zero3      # one of them, or a new one
    python -m tests.behaviour.record saved ddp       # a checkpoint, and what becomes of it
    python -m tests.behaviour.record interface       # verbs, options, settings, cells, wire
    python -m tests.behaviour.record error_texts     # what tests quote

To add a seeded run, add a line to `RUNS` in `runs.py` and record that name. To add a checkpoint,
add a line to `SAVED` in `saved.py`. A checkpoint that an earlier version has written cannot be
written by a later one: keep it, and add another under a new name. To change an expected text, add
the old one to `recorded/changed_texts.json` with the reason; to take something away from the
interface, add it to `recorded/changed_interface.json`.

Bits are compared where torch, the vector units and the bits of plain PyTorch on one device are
those of the record. Elsewhere float64 is compared to 1e-10, and float32 to its own rounding.

Everything here goes through the public API, the command line and `shoal.testing.world`, so that
it outlives every rearrangement of the package.
"""
