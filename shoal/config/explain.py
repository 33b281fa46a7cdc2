"""Text of a Job: the YAML that reproduces it, origins of its values, differences to another."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from shoal.config.fields import all_sections, all_settings, leaf_settings, value_of
from shoal.config.job import Job
from shoal.config.read import Settings
from shoal.config.yaml_subset import write

# The column in which help starts in YAML, unless a value is longer.
HELP_COLUMN = 36
# A wider value moves only its own origin to the right, so that the others stay on the screen.
MAX_VALUE_WIDTH = 24
# Columns of an explanation.
WIDTH = 100
# These settings do not change the numbers: they say where and how a job runs, what it saves and
# what it prints. `train.accumulate` is among them because it replaces ranks, and the number of
# ranks does not count either. `train.nonfinite` decides about steps without numbers.
NON_SEMANTIC = {
    "name",
    "out",
    "strategy",
    "plugins",
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
}


def to_yaml(job: Job) -> str:
    """Return the job as YAML, with each setting's meaning as a comment.

    `read` returns an equal job for it.
    """
    return "\n".join(_yaml_lines(job)) + "\n"


def explain(settings: Settings) -> str:
    """Return lines with each dotted name, its value and its origin, and its meaning below."""
    rows = [
        (name, write(value), settings.origins[name])
        for name, value in leaf_settings(settings.job).items()
    ]
    name_width = max(len(name) for name, _, _ in rows)
    value_width = min(MAX_VALUE_WIDTH, max(len(value) for _, value, _ in rows))
    lines = []
    for name, value, origin in rows:
        lines.append(f"{name:{name_width}}  {value:{value_width}}  {origin}")
        if name in all_settings():
            help = wrap(all_settings()[name].help, WIDTH - 4, break_on_hyphens=False)
            lines += [f"    {line}" for line in help]
    return "\n".join(lines) + "\n"


def _yaml_lines(job: Job) -> Iterator[str]:
    section = ""
    for name, setting in all_settings().items():
        if setting.section != section:
            section = setting.section
            yield from ("", f"{section + ':':{HELP_COLUMN}}# {all_sections()[section]}")
        indented = "  " * bool(section) + name.rpartition(".")[2]
        line = f"{indented}: {write(value_of(job, name))}"
        yield f"{line:{HELP_COLUMN - 1}} # {setting.help}"


def differences(there: Job, here: Job) -> list[str]:
    """Return the settings in which two jobs differ, as `optimizer.lr: 0.1 there, 0.2 here`.

    It is empty where both are the same experiment. The settings in NON_SEMANTIC do not count, such
    as the directory of a run and the interval of its checkpoints.
    """
    before, after = (
        # Without open settings that are empty.
        {name: value for name, value in leaf_settings(job).items() if value != {}}
        for job in (there, here)
    )
    differing = []
    for name in {**before, **after}:
        if {name, name.partition(".")[0]} & NON_SEMANTIC:
            continue
        texts = [write(job[name]) if name in job else "not set" for job in (before, after)]
        # A tuple in a program becomes a list in YAML, so equal texts count as equal.
        if texts[0] != texts[1] and before.get(name, ...) != after.get(name, ...):
            differing.append(f"{name}: {texts[0]} there, {texts[1]} here")
    return differing
