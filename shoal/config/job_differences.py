"""What makes two jobs different experiments."""

from __future__ import annotations

from typing import Any

from shoal.config.fields import leaf_settings
from shoal.config.job import Job
from shoal.config.yaml_subset import write

# Where and how a job runs, what it keeps and what it prints: none of it changes the numbers. The
# processes that share a batch do not count either, so `accumulate`, which stands for missing ones,
# does not.
NON_SEMANTIC = (
    "name",
    "out",
    "strategy",
    "imports",
    "model.compile",
    "model.channels_last",
    "data.path",
    "data.workers",
    "data.pin_memory",
    "train.accumulate",
    "train.record",
    "train.cudnn_benchmark",
    "train.deterministic",
    "evaluation.every",
    "evaluation.batch_size",
    "checkpoint",
    "log",
)


def differences(there: Job, here: Job) -> list[str]:
    """What makes two jobs different experiments, as `optimizer.lr: 0.1 there, 0.2 here`; empty if
    they are one.

    Circumstances do not count: where a job runs and on how many processes, what it writes and how
    often."""
    before, after = _set_values(there), _set_values(here)
    return [
        f"{name}: {_shown(before, name)} there, {_shown(after, name)} here"
        for name in {**before, **after}
        if not _is_circumstance(name) and _differ(before, after, name)
    ]


def _set_values(job: Job) -> dict[str, Any]:
    """The leaves of a job, without the open settings that are empty."""
    return {name: value for name, value in leaf_settings(job).items() if value != {}}


def _is_circumstance(name: str) -> bool:
    return name in NON_SEMANTIC or name.partition(".")[0] in NON_SEMANTIC


def _differ(before: dict[str, Any], after: dict[str, Any], name: str) -> bool:
    if name not in before or name not in after:
        return True
    # Not only by value: what was a tuple in a program is a list in the file that it was written to.
    return bool(before[name] != after[name]) and write(before[name]) != write(after[name])


def _shown(values: dict[str, Any], name: str) -> str:
    return write(values[name]) if name in values else "not set"
