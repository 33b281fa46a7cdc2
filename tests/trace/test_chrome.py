"""The file: what viewers demand of it, and that it holds what was put into it."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.trace import chrome
from shoal.trace.chrome import Trace
from shoal.trace.recorder import BACKWARD, BLOCKED, EXCHANGE, STEP, Span


def a_trace(directory: Path, exchanges: int = 3) -> Trace:
    spans: dict[int, list[Span]] = {}
    for rank, begun in ((0, 5_000_000_123), (1, 5_000_000_456)):
        flown = [
            Span(
                EXCHANGE,
                f"all_reduce {n}",
                begun + 100 * n,
                begun + 5000 + n,
                4096,
                "world",
                n,
                (1 - rank,),
            )
            for n in range(exchanges)
        ]
        blocked = Span(BLOCKED, "all_reduce 0", begun + 3000, begun + 5000, 0, "world", 0)
        rest = [
            Span(STEP, "step 4", begun, begun + 9999),
            Span(BACKWARD, "backward", begun + 10, begun + 6000),
        ]
        spans[rank] = [*rest, *flown, blocked]
    return Trace(spans, {0: "here", 1: "there"}, [4], 2e-6, directory / chrome.NAME)


def events(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return found


def test_what_was_written_is_read_to_the_nanosecond(tmp_path: Path) -> None:
    trace = a_trace(tmp_path)
    assert chrome.write(trace, tmp_path) == tmp_path / "trace.json"
    read = chrome.read(tmp_path)
    begun_ns = 5_000_000_123
    for rank, spans in trace.spans.items():
        assert sorted(read.spans[rank]) == sorted(span.moved(-begun_ns) for span in spans)
    assert (read.hosts, read.steps, read.clock_error_s, read.file) == (
        trace.hosts,
        [4],
        2e-6,
        trace.file,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_the_file_follows_the_trace_event_format(tmp_path: Path) -> None:
    """Object form; X events with numbers for times, M events that name every process and thread
    in use.
    """
    found = events(chrome.write(a_trace(tmp_path), tmp_path))
    assert {event["ph"] for event in found} == {"X", "M"}
    for event in found:
        assert {"name", "ph", "pid", "tid", "args"} <= set(event)
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
    used = {(event["pid"], event["tid"]) for event in found if event["ph"] == "X"}
    named = {(e["pid"], e["tid"]) for e in found if e["name"] == "thread_name"}
    assert used == named
    processes = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert processes == {0: "rank 0 (here)", 1: "rank 1 (there)"}


def test_events_of_a_thread_lie_inside_each_other_or_apart(tmp_path: Path) -> None:
    found = [
        event for event in events(chrome.write(a_trace(tmp_path), tmp_path)) if event["ph"] == "X"
    ]
    for thread in {(event["pid"], event["tid"]) for event in found}:
        mine = [e for e in found if (e["pid"], e["tid"]) == thread]
        for number, first in enumerate(mine):
            for second in mine[number + 1 :]:
                start, end = (
                    max(first["ts"], second["ts"]),
                    min(first["ts"] + first["dur"], second["ts"] + second["dur"]),
                )
                inside = end - start == pytest.approx(min(first["dur"], second["dur"]))
                assert inside or end <= start + 1e-9, (first, second)


def test_an_exchange_shows_for_whom_it_waits_and_what_is_transfer(tmp_path: Path) -> None:
    details = [
        e for e in events(chrome.write(a_trace(tmp_path, 1), tmp_path)) if e.get("cat") == "detail"
    ]
    assert [(e["pid"], e["name"]) for e in details] == [
        (0, "waiting for rank 1"),
        (0, "transfer"),
        (1, "transfer"),
    ]
    assert details[0]["dur"] == pytest.approx(0.333)


def test_a_trace_replaces_the_one_before(tmp_path: Path) -> None:
    chrome.write(a_trace(tmp_path, 1), tmp_path)
    file = chrome.write(a_trace(tmp_path), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert len(chrome.read(tmp_path).spans[1]) == 6
    assert len(chrome.read(file).spans[1]) == 6


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such directory"):
        chrome.read(tmp_path / "nowhere")
    with pytest.raises(
        ConfigError, match=r"holds no trace\.json\. It is made by `shoal train \.\.\. --trace`"
    ):
        chrome.read(tmp_path)
    other = tmp_path / "other"
    for content in (
        b"",
        b"{",
        b"[]",
        b'{"traceEvents": []}',
        b"\x1f\x8b\x08",
        b'{"otherData": {"shoal": 3}}',
    ):
        other.write_bytes(content)
        with pytest.raises(ConfigError, match="not a trace that Shoal wrote"):
            chrome.read(other)
    document = json.loads(chrome.write(a_trace(tmp_path), tmp_path).read_text())
    said = document["otherData"]["shoal"]
    for wrong, words in (
        ({"steps": []}, "holds no whole step"),
        ({"clock_error_s": None}, "not a trace that Shoal"),
    ):
        other.write_text(json.dumps(document | {"otherData": {"shoal": said | wrong}}))
        with pytest.raises(ConfigError, match=words):
            chrome.read(other)
    document["otherData"]["shoal"]["format"] = 9
    other.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="format 9 are not known"):
        chrome.read(other)
