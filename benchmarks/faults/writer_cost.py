"""Microseconds of CPU time that the writer of progress words costs a rank, a call. `python -m
benchmarks.faults.writer_cost` puts them into result.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report_page import write_result
from shoal.watchdog.progress_word import Phase, ProgressMemory
from shoal.watchdog.progress_writer import ProgressWriter

RESULT = Path(__file__).with_name("result.json")
CALLS, ROUNDS = 20_000, 50


def main() -> None:
    memory = ProgressMemory(1)
    writer = ProgressWriter()
    assert memory.path is not None
    writer.attach(memory.path, 0, 60.0)
    calls = writer.join_group("all", [0, 1])
    result = json.loads(RESULT.read_text())
    result["writer_us"] = {
        "a collective": microseconds(lambda: calls.begin(7, 1 << 30)),
        "a phase": microseconds(lambda: writer.enter(Phase.FORWARD)),
        "the end of a step": microseconds(writer.end_step),
    }
    write_result(RESULT, result)
    print(result["writer_us"])


def microseconds(call: Callable[[], None]) -> float:
    """Return the time of a call in the fastest of some rounds."""
    times = []
    for _ in range(ROUNDS):
        begin_s = time.process_time()
        for _ in range(CALLS):
            call()
        times.append((time.process_time() - begin_s) / CALLS)
    return min(times) * 1e6


if __name__ == "__main__":
    main()
