"""The time of a training step: spans of every rank, on one clock, in one file.

    rank 0   data │ forward │ backward ▓▓▓▓▓▓▓▓│░░░░│ optimizer            ░  blocked
                              └── all_reduce ───────┘
    rank 1   data ───────── │ forward │ backward ▓▓▓▓▓▓▓▓│░│ optimizer
                                        └── all_reduce ──┘
                              ├─────────┤      rank 0 has entered, rank 1 has not: waiting

recorder.py   spans, recorded on one rank
breakdown.py  spans -> shares of a step's time
chrome.py     spans -> Chrome's trace events, and back

An *exchange* is a collective, or a message between two ranks.
"""
