"""Spans as Chrome's trace events, and back: what https://ui.perfetto.dev and chrome://tracing open.

      process "rank 0 (host)"     thread "step"              step 11
                                  thread "this rank"         data │ forward │ backward [blocked] │ optimizer
                                  thread "communication 1"   all_reduce 4.0 MiB [waiting for rank 1 │ transfer]

Events of one thread may lie inside each other but not overlap, so exchanges that are under way
together get threads of their own. Times are in microseconds after the first step began, on rank 0's
clock.

Source: "Trace Event Format", Google, 2016: complete events ("X") and metadata ("M") in the object
form."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.platform.files import atomic_write
from shoal.trace.breakdown import Collectives, Spans, Wait, group_collectives, wait_of
from shoal.trace.span import BLOCKED, EXCHANGE, KINDS, STEP, Span

NAME, PACKED = "trace.json", "trace.json.gz"
PACK_FROM_BYTES = 8 * 2**20
FORMAT = 1
STEPS_THREAD, OWN_THREAD, FIRST_LANE = 0, 1, 2


@dataclass(frozen=True)
class Trace:
    """What was traced.

    Args:
        spans: of each rank, on rank 0's clock.
        hosts: of each rank, its name.
        steps: their numbers, counted from 1 in this start of the run.
        clock_error_s: what times of different hosts may be wrong by; 0 on one host.
        file: where it was read.
    """

    spans: Spans
    hosts: Mapping[int, str]
    steps: Sequence[int]
    clock_error_s: float = 0.0
    file: Path = field(default_factory=Path)


def write(trace: Trace, directory: Path) -> Path:
    """Put a trace into a directory as one file, in place of the one before, whole or not at
    all. Raises OSError.
    """
    data = json.dumps(_document(trace), separators=(",", ":")).encode()
    packed = len(data) >= PACK_FROM_BYTES
    name, other = (PACKED, NAME) if packed else (NAME, PACKED)
    directory.mkdir(parents=True, exist_ok=True)
    with atomic_write(directory / name, many_writers=True) as file:
        file.write(gzip.compress(data, 6) if packed else data)
    (directory / other).unlink(missing_ok=True)
    return directory / name


def read(where: Path) -> Trace:
    """Read what `write` wrote, or the file itself. Raises ConfigError: there is none, or it is
    another file.
    """
    file = _file(where)
    data = file.read_bytes()
    try:
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        said = document["otherData"]["shoal"]
        if said["format"] != FORMAT:
            raise ConfigError(
                [f"{file}: traces of format {said['format']} are not known here; known: {FORMAT}"]
            )
        spans: dict[int, list[Span]] = {int(rank): [] for rank in said["hosts"]}
        for event in document["traceEvents"]:
            if event["ph"] == "X" and event["cat"] in KINDS:
                spans[event["pid"]].append(_span(event))
        hosts = {int(rank): host for rank, host in said["hosts"].items()}
        steps, clock_error_s = [int(step) for step in said["steps"]], float(said["clock_error_s"])
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        OSError,
        zlib.error,
    ) as error:
        raise ConfigError(
            [f"{file}: not a trace that Shoal wrote ({type(error).__name__}: {error})"]
        ) from error
    if not steps:
        raise ConfigError(
            [
                f"{file}: holds no whole step. Trace steps that the run takes to their end: "
                "--trace=3@10"
            ]
        )
    return Trace(spans, hosts, steps, clock_error_s, file)


def _file(where: Path) -> Path:
    if where.is_file():
        return where
    if not where.exists():
        raise ConfigError(
            [f"{where}: there is no such directory; give the --out of a run, such as runs/digits"]
        )
    found = [where / name for name in (NAME, PACKED) if (where / name).is_file()]
    if not found:
        raise ConfigError(
            [
                f"{where}: holds no {NAME}. It is made by `shoal train ... --trace`, while the run "
                "trains"
            ]
        )
    return found[0]


def _span(event: Mapping[str, Any]) -> Span:
    args = event.get("args", {})
    start_ns = round(event["ts"] * 1000)
    return Span(
        event["cat"],
        args.get("name", event["name"]),
        start_ns,
        start_ns + round(event["dur"] * 1000),
        args.get("bytes", 0),
        args.get("meeting", ""),
        args.get("number", 0),
        tuple(args.get("waits_for", ())),
    )


def _document(trace: Trace) -> dict[str, Any]:
    begun_ns = min(
        (s.start_ns for mine in trace.spans.values() for s in mine if s.kind == STEP), default=0
    )
    shoal = {
        "format": FORMAT,
        "steps": list(trace.steps),
        "hosts": {str(rank): host for rank, host in trace.hosts.items()},
        "clock_error_s": trace.clock_error_s,
    }
    met = group_collectives(trace.spans)
    events = [event for rank in trace.spans for event in _events(trace, rank, begun_ns, met)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"shoal": shoal}}


def _events(trace: Trace, rank: int, begun_ns: int, met: Collectives) -> Iterator[dict[str, Any]]:
    """One rank's, in the order that viewers want: what begins first, and what holds others
    before them.
    """
    spans = sorted(trace.spans[rank], key=lambda span: (span.start_ns, -span.end_ns))
    lanes = assign_lanes([span for span in spans if span.kind == EXCHANGE])
    threads = {STEPS_THREAD: "step", OWN_THREAD: "this rank"}
    threads |= {
        FIRST_LANE + lane: f"communication {lane + 1}" for lane in sorted(set(lanes.values()))
    }
    yield _metadata("process_name", rank, 0, f"rank {rank} ({trace.hosts[rank]})")
    yield _metadata("process_sort_index", rank, 0, rank)
    for thread, name in threads.items():
        yield _metadata("thread_name", rank, thread, name)
        yield _metadata("thread_sort_index", rank, thread, thread)
    for span in spans:
        thread = {STEP: STEPS_THREAD, EXCHANGE: FIRST_LANE + lanes.get(id(span), 0)}.get(
            span.kind, OWN_THREAD
        )
        yield _event(span, rank, thread, begun_ns)
        if span.kind == EXCHANGE:
            yield from _details(span, wait_of(span, met), rank, thread, begun_ns)


def _event(span: Span, rank: int, thread: int, begun_ns: int) -> dict[str, Any]:
    args: dict[str, Any] = {}
    name = span.name
    if span.kind == EXCHANGE:
        name = f"{span.name} {human_size(span.size_bytes)}"
        args = {"bytes": span.size_bytes, "waits_for": list(span.ranks)}
    if span.kind == BLOCKED:
        name = f"wait: {span.name}"
    if span.collective_id:
        args |= {"name": span.name, "meeting": span.collective_id, "number": span.number}
    elif name != span.name:
        args["name"] = span.name
    return _complete(name, span.kind, span.interval, rank, thread, begun_ns, args)


def _details(
    span: Span, wait: Wait | None, rank: int, thread: int, begun_ns: int
) -> Iterator[dict[str, Any]]:
    """Wait and transfer of an exchange, inside it."""
    came_ns = span.start_ns
    if wait is not None:
        came_ns = wait.stretch[1]
        yield _complete(
            f"waiting for rank {wait.rank}", "detail", wait.stretch, rank, thread, begun_ns, {}
        )
    if span.end_ns > came_ns:
        yield _complete("transfer", "detail", (came_ns, span.end_ns), rank, thread, begun_ns, {})


def _complete(
    name: str,
    kind: str,
    stretch: tuple[int, int],
    rank: int,
    thread: int,
    begun_ns: int,
    args: dict[str, Any],
) -> dict[str, Any]:
    start_ns, end_ns = stretch
    times = {"ts": (start_ns - begun_ns) / 1000, "dur": (end_ns - start_ns) / 1000}
    return {"name": name, "cat": kind, "ph": "X", **times, "pid": rank, "tid": thread, "args": args}


def _metadata(kind: str, rank: int, thread: int, value: str | int) -> dict[str, Any]:
    key = "name" if isinstance(value, str) else "sort_index"
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {key: value}}


def assign_lanes(spans: Sequence[Span]) -> dict[int, int]:
    """For each span, by its id, the first lane in which nothing else is under way."""
    ends: list[int] = []
    found = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        lane = next((number for number, end in enumerate(ends) if end <= span.start_ns), len(ends))
        if lane == len(ends):
            ends.append(0)
        ends[lane] = max(span.end_ns, span.start_ns + 1)
        found[id(span)] = lane
    return found


def human_size(size_bytes: int) -> str:
    """`512 B`, `4.0 KiB`, `25.0 MiB`."""
    if size_bytes < 2**10:
        return f"{size_bytes} B"
    return (
        f"{size_bytes / 2**10:.1f} KiB" if size_bytes < 2**20 else f"{size_bytes / 2**20:.1f} MiB"
    )
