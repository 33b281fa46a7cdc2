"""Where a step's time went: spans of every rank, on one clock, in one file.

    rank 0   data │ forward │ backward ▓▓▓▓▓▓▓▓│░░░░│ optimizer         ░  blocked: this rank computes nothing
                              └── all_reduce ───────┘
    rank 1   data ───────── │ forward │ backward ▓▓▓▓▓▓▓▓│░│ optimizer
                                        └── all_reduce ──┘
                              ├─────────┤                               rank 0 has arrived, rank 1 has not: waiting

recorder.py   notes spans, on one rank       account.py    spans -> how much of a step was what
span.py       what a span is                 chrome.py     spans -> Chrome's trace events, and back
intervals.py  arithmetic on stretches        report.py     the account as a table and as JSON
"""
