"""The settings in which two jobs differ as experiments."""

from __future__ import annotations

from typing import Any

from shoal.config.fields import leaf_settings
from shoal.config.job import Job
from shoal.config.yaml_subset import write

# These settings do not change the numbers: they say where and how a job runs, what it saves and
# what it prints. `train.accumulate` is among them because it replaces ranks, and the number of
# ranks does not count either. `train.nonfinite` decides about steps without numbers.
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
    "train.nonfinite",
    "train.max_nonfinite",
    "train.accept_data",
    "train.check_replicas",
    "train.record",
    "train.hang_limit_s",
    "train.cudnn_benchmark",
    "train.deterministic",
    "evaluation.every",
    "evaluation.batch_size",
    "checkpoint",
    "log",
)


def differences(there: Job, here: Job) -> list[str]:
    """Return the settings in which two jobs differ, as `optimizer.lr: 0.1 there, 0.2 here`.

    It is empty where both are the same experiment. The settings in NON_SEMANTIC do not count, such
    as the directory of a run and the interval of its checkpoints.
    """
    before = _set_values(there)
    after = _set_values(here)
    return [
        f"{name}: {_text(before, name)} there, {_text(after, name)} here"
        for name in {**before, **after}
        if not _is_non_semantic(name) and _differ(before, after, name)
    ]


def _set_values(job: Job) -> dict[str, Any]:
    """Return the values of a job, without open settings that are empty."""
    return {name: value for name, value in leaf_settings(job).items() if value != {}}


def _is_non_semantic(name: str) -> bool:
    return name in NON_SEMANTIC or name.partition(".")[0] in NON_SEMANTIC


def _differ(before: dict[str, Any], after: dict[str, Any], name: str) -> bool:
    if name not in before or name not in after:
        return True
    # A tuple in a program becomes a list in YAML, so equal texts count as equal.
    return bool(before[name] != after[name]) and write(before[name]) != write(after[name])


def _text(values: dict[str, Any], name: str) -> str:
    return write(values[name]) if name in values else "not set"
