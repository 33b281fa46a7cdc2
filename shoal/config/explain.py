"""Text of a Job: as the YAML that reproduces it, or with the origin of every value."""

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
            opening = f"{_indented(section)}:"
            yield from ("", f"{opening:{HELP_COLUMN}}# {all_sections()[section]}")
        line = f"{_indented(name)}: {write(value_of(job, name))}"
        yield f"{line:{HELP_COLUMN - 1}} # {setting.help}"


def _indented(name: str) -> str:
    above, _, last = name.rpartition(".")
    return "  " * len(above.split(".") if above else []) + last
