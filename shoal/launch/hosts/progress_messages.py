"""Progress words of a host's ranks as messages: an agent sends what has changed.

    "progress"  a rank's word, and what has changed of its calls, steps and groups
    "looked"    the ranks that live, the time since the last look, and if they are halted

A "looked" follows the words of its look. So a rank without a word in between has not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.launch.hosts.agent_messages import Message
from shoal.launch.progress_source import Look
from shoal.watchdog.progress_word import (
    STEPS,
    GroupMembers,
    ProgressWord,
    RankProgress,
    StepTimes,
)


class ProgressChanges:
    """The agent's side: it turns looks into messages."""

    def __init__(self) -> None:
        self._sent: dict[int, RankProgress] = {}

    def messages(self, look: Look) -> list[Message]:
        """Return the messages of a look, in their order, each with its kind under "do"."""
        messages: list[Message] = []
        for rank, progress in look.progress.items():
            before = self._sent.get(rank)
            if progress != before:
                messages.append({"do": "progress", "rank": rank, **changes(before, progress)})
                self._sent[rank] = progress
        passed_s = max(look.passed_s.values(), default=0.0)
        ranks = sorted(look.progress)
        messages.append({"do": "looked", "ranks": ranks, "passed_s": passed_s, "halt": look.halt})
        return messages


def changes(before: RankProgress | None, after: RankProgress) -> dict[str, Any]:
    """Return what has changed in a rank's progress as plain data; all of it before the first."""
    known_calls: Mapping[int, int] = before.calls if before is not None else {}
    known_steps = set(before.steps) if before is not None else set()
    message: dict[str, Any] = {
        "word": list(after.word),
        "calls": [[group, n] for group, n in after.calls.items() if known_calls.get(group) != n],
        "steps": [list(times) for times in after.steps if times not in known_steps],
    }
    about = (after.groups, after.pacing, after.stage)
    if before is None or about != (before.groups, before.pacing, before.stage):
        message["groups"] = [
            [number, group.label, list(group.ranks)] for number, group in after.groups.items()
        ]
        message["pacing"], message["stage"] = after.pacing, after.stage
    return message


def changed(before: RankProgress | None, message: Message) -> RankProgress:
    """Return a rank's progress after a message.

    Raises:
        KeyError, TypeError, ValueError: it is no such message.
    """
    before = before or RankProgress(ProgressWord(*[0] * len(ProgressWord._fields)))
    word = ProgressWord(*map(int, message["word"]))
    calls = {**before.calls, **{int(group): int(n) for group, n in message["calls"]}}
    steps = {times.step: times for times in before.steps}
    for numbers in message["steps"]:
        times = StepTimes(*map(int, numbers))
        steps[times.step] = times
    groups, pacing, stage = before.groups, before.pacing, before.stage
    if "groups" in message:
        groups = {
            int(number): GroupMembers(str(label), tuple(map(int, ranks)))
            for number, label, ranks in message["groups"]
        }
        pacing, stage = str(message["pacing"]), int(message["stage"])
    last = [steps[step] for step in sorted(steps)[-STEPS:]]
    return RankProgress(word, calls, groups, last, pacing, stage)
