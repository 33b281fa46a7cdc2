"""Chrome's trace events, the file format of https://ui.perfetto.dev and chrome://tracing: spans to
a file, and back.

      process "rank 0 (host)"
        thread "step"              step 11
        thread "this rank"         data │ forward │ backward [blocked] │ optimizer
        thread "communication 1"   all_reduce 4.0 MiB [waiting for rank 1 │ transfer]

Events of one thread may be nested but must not overlap. Exchanges that are in flight at the same
time therefore get threads of their own (`assign_lanes`). Times are in microseconds after the begin
of the first step, on rank 0's clock.

Source: "Trace Event Format", Google, 2016: complete events ("X") and metadata ("M") in the object
form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.platform.files import atomic_write
from shoal.platform.quantity_text import bytes_text
from shoal.trace.breakdown import Collectives, Spans, group_collectives, wait_of
from shoal.trace.recorder import BLOCKED, EXCHANGE, KINDS, STEP, Span

NAME = "trace.json"
FORMAT = 2
"""Version of the entry "shoal" in "otherData"."""
STEPS_THREAD = 0
PHASES_THREAD = 1
FIRST_LANE = 2
INVALID_FILE = (RecursionError, ValueError, KeyError, TypeError, AttributeError, OSError)
"""Errors that a file of another kind can raise."""


@dataclass(frozen=True)
class Trace:
    """A trace of all ranks.

    Attributes:
        spans: rank -> spans, on rank 0's clock.
        hosts: rank -> name of its host.
        steps: numbers of the traced steps, counted from 1 since the run was started.
        clock_error_s: bound on the error of times of different hosts; 0 on one host.
        file: the file from which the trace was read.
    """

    spans: Spans
    hosts: Mapping[int, str]
    steps: Sequence[int]
    clock_error_s: float = 0.0
    file: Path = field(default_factory=Path)


def write(trace: Trace, directory: Path) -> Path:
    """Write a trace into a directory, atomically. Return its file. Raises: OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    with atomic_write(directory / NAME, many_writers=True) as file:
        file.write(json.dumps(_document(trace), separators=(",", ":")).encode())
    return directory / NAME


def read(path: Path) -> Trace:
    """Read a trace that `write` wrote.

    Args: path: the file, or its directory.

    Raises: ConfigError: there is no such file, Shoal did not write it, or it has no complete step.
    """
    file = find_file(path)
    if file is None:
        raise ConfigError(_missing(path))
    data = file.read_bytes()
    try:
        trace = _trace(json.loads(data), file)
    except INVALID_FILE as error:
        raise ConfigError(
            f"{file}: not a trace that Shoal wrote ({type(error).__name__}: {error})"
        ) from error
    if not trace.steps:
        raise ConfigError(
            f"{file}: holds no whole step. Trace steps that the run takes to their end: "
            "--trace=3@10"
        )
    return trace


def _trace(document: Any, file: Path) -> Trace:
    header = document["otherData"]["shoal"]
    if header["format"] != FORMAT:
        raise ConfigError(
            f"{file}: traces of format {header['format']} are not known here; known: {FORMAT}"
        )
    hosts = {int(rank): host for rank, host in header["hosts"].items()}
    spans: dict[int, list[Span]] = {rank: [] for rank in hosts}
    for event in document["traceEvents"]:
        if event["ph"] == "X" and event["cat"] in KINDS:
            fields = event["args"]
            spans[event["pid"]].append(Span(**{**fields, "ranks": tuple(fields["ranks"])}))
    steps = [int(step) for step in header["steps"]]
    return Trace(spans, hosts, steps, float(header["clock_error_s"]), file)


def find_file(path: Path) -> Path | None:
    """Return a trace's file: the path itself, or the one of a directory; None without one."""
    return next((file for file in (path, path / NAME) if file.is_file()), None)


def _missing(path: Path) -> str:
    if not path.exists():
        return f"{path}: there is no such directory; give the --out of a run, such as runs/digits"
    return f"{path}: holds no {NAME}. It is made by `shoal train ... --trace`, while the run trains"


def _document(trace: Trace) -> dict[str, Any]:
    """Return the JSON document, whose times begin with the first step."""
    origin_ns = min(
        (span.start_ns for spans in trace.spans.values() for span in spans if span.kind == STEP),
        default=0,
    )
    header = {
        "format": FORMAT,
        "steps": list(trace.steps),
        "hosts": {str(rank): host for rank, host in trace.hosts.items()},
        "clock_error_s": trace.clock_error_s,
    }
    moved = {rank: [s.moved(-origin_ns) for s in spans] for rank, spans in trace.spans.items()}
    collectives = group_collectives(moved)
    events: list[dict[str, Any]] = []
    for rank, spans in moved.items():
        events += _events_of(rank, trace.hosts[rank], spans, collectives)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"shoal": header}}


def _events_of(
    rank: int, host: str, spans: Sequence[Span], collectives: Collectives
) -> Iterator[dict[str, Any]]:
    """Yield the names of a rank's process and threads, then its spans, each with all its fields."""
    # In the order that viewers want: by start, and outer spans before those inside them.
    spans = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
    lanes = assign_lanes([span for span in spans if span.kind == EXCHANGE])
    threads = {STEPS_THREAD: "step", PHASES_THREAD: "this rank"}
    for lane in sorted(set(lanes.values())):
        threads[FIRST_LANE + lane] = f"communication {lane + 1}"

    def metadata(kind: str, thread: int, **args: Any) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": args}

    def complete(
        name: str, kind: str, start_ns: int, end_ns: int, thread: int, args: dict[str, Any]
    ) -> dict[str, Any]:
        times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
        place = {"pid": rank, "tid": thread, "args": args}
        return {"name": name, "cat": kind, "ph": "X", **times, **place}

    yield metadata("process_name", 0, name=f"rank {rank} ({host})")
    yield metadata("process_sort_index", 0, sort_index=rank)
    for thread, name in threads.items():
        yield metadata("thread_name", thread, name=name)
        yield metadata("thread_sort_index", thread, sort_index=thread)
    for span in spans:
        thread, name = PHASES_THREAD, span.name
        if span.kind == STEP:
            thread = STEPS_THREAD
        elif span.kind == BLOCKED:
            name = f"wait: {span.name}"
        elif span.kind == EXCHANGE:
            thread = FIRST_LANE + lanes[id(span)]
            name = f"{span.name} {bytes_text(span.size_bytes)}"
        yield complete(name, span.kind, *span.interval, thread, span._asdict())
        if span.kind == EXCHANGE:  # its wait and its transfer, inside
            transfer_ns = span.start_ns
            if (wait := wait_of(span, collectives)) is not None:
                transfer_ns = wait.end_ns
                yield complete(wait.name, "detail", *wait.interval, thread, {})
            if span.end_ns > transfer_ns:
                yield complete("transfer", "detail", transfer_ns, span.end_ns, thread, {})


def assign_lanes(spans: Sequence[Span]) -> dict[int, int]:
    """Return id(span) -> lane, so that spans of one lane do not overlap. Each span gets the first
    free lane.
    """
    ends_ns: list[int] = []
    lanes = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        free = (lane for lane, end_ns in enumerate(ends_ns) if end_ns <= span.start_ns)
        lane = next(free, len(ends_ns))
        if lane == len(ends_ns):
            ends_ns.append(0)
        # A span of no length takes its lane all the same, or two of them would fall on one spot.
        ends_ns[lane] = max(span.end_ns, span.start_ns + 1)
        lanes[id(span)] = lane
    return lanes
