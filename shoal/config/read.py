"""A Job made of a file and flags, with all of its values checked and their origins known.

The limits of one setting alone are in job.py, and rules about strategies and ranks in
shoal.strategies.precheck. A rule between several settings names those that it compares, the one to
blame first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoal.config.fields import all_settings, build, convert, leaf_settings, open_setting
from shoal.config.job import OWN_SCHEDULES, Job, ScheduleConfig
from shoal.config.layers import Layer, file_layers, flag_layer, merged
from shoal.errors import raise_problems

DEFAULT = "default"
# Only numbers that are known without reading the data. Data sets that --plugin registers are
# checked where they are loaded.
CLASSES = {"digits": 10, "cifar10": 10, "cifar100": 100, "stdlib": 256}
LANGUAGE = {"stdlib"}

Violation = tuple[tuple[str, ...], str]
"""The compared settings, by dotted name, and the problem."""


@dataclass(frozen=True)
class Settings:
    """A job, and the origin of each of its values.

    Args:
        job: the job.
        origins: `default`, `file.yaml:12` or `flag --optimizer.lr` by dotted name, which is
            `model.options.width` for a key of an open setting. The origin of a value that follows
            from the name of a file has no line.
    """

    job: Job
    origins: Mapping[str, str]


def read(source: str | Path | None, flags: Sequence[tuple[str, str]] = ()) -> Settings:
    """Return the settings of a configuration, with flags on top.

    Args:
        source: the name of a built-in configuration, the path of a YAML file, or None for defaults.
        flags: pairs of dotted name and text, as on the command line. The text is a YAML scalar, or
            a list or mapping in flow style.

    Raises:
        ConfigError: all problems, each with file and line, or flag.
    """
    problems: list[str] = []
    layers = [] if source is None else file_layers(source, problems)
    return resolve([*layers, flag_layer(flags, problems)], problems)


def resolve(layers: Sequence[Layer], problems: Sequence[str] = ()) -> Settings:
    """Return the settings of several layers, the lowest first.

    Args:
        layers: values by dotted name.
        problems: problems of the caller, which are reported with the others.

    Raises:
        ConfigError: there are problems, or values do not fit their settings or each other.
    """
    problems = list(problems)
    layer = merged(layers)
    values, failed = _converted(layer, problems)
    job = build(values)
    for names, text in violations(job):
        # In place of a value that could not be converted the job has the default. A rule that
        # compares it would report a value that nobody chose.
        if failed.isdisjoint(names):
            problems.append(f"{_origin_of(names, layer)}: {names[0]} {text}")
    raise_problems(problems)
    origins = {
        name: layer[name].origin if name in layer else DEFAULT for name in leaf_settings(job)
    }
    return Settings(job, origins)


def _converted(layer: Layer, problems: list[str]) -> tuple[dict[str, Any], set[str]]:
    """Return values of the settings' types, and the settings whose values do not fit."""
    values: dict[str, Any] = {}
    failed: set[str] = set()
    for name, item in layer.items():
        try:
            if key := open_setting(name):
                values.setdefault(key[0], {})[key[1]] = item.plain()
            else:
                values[name] = convert(item, all_settings()[name])
        except ValueError as error:
            problems.append(f"{item.origin}: {name} {error}")
            failed.add(name)
    return values, failed


def _origin_of(names: Sequence[str], layer: Layer) -> str:
    """Return the origin of the first of these settings that is not a default.

    There is one, because defaults alone break no rule.
    """
    for name in names:
        for key, item in layer.items():
            if key == name or key.startswith(f"{name}."):
                return item.origin
    return DEFAULT


def violations(job: Job) -> Iterator[Violation]:
    """Yield, for each rule that the job breaks, the settings that it compares and the problem.

    The problem is the rest of a sentence that begins with the first of these settings.
    """
    yield from _training(job)
    yield from _optimizer(job)
    yield from _schedule(job)
    yield from _data(job)
    yield from _checkpoint(job)


def _training(job: Job) -> Iterator[Violation]:
    """Check the parts of a batch, and settings that contradict each other."""
    train = job.train
    if train.accumulate > train.batch_size:
        names = ("train.accumulate", "train.batch_size")
        yield (
            names,
            f"is {train.accumulate}, more parts than the {train.batch_size} samples of "
            "train.batch_size",
        )
    if train.deterministic and train.cudnn_benchmark:
        names = ("train.cudnn_benchmark", "train.deterministic")
        yield (
            names,
            "may choose other kernels in every run, which train.deterministic forbids; turn one of "
            "them off",
        )
    if train.record and job.checkpoint.fast_dir is not None:
        yield (
            ("checkpoint.fast_dir", "train.record"),
            "keeps no record of pushes, which train.record needs up to the step that is resumed; "
            "turn one of them off",
        )


def _optimizer(job: Job) -> Iterator[Violation]:
    """Check what torch.optim would refuse later, or would silently overwrite."""
    optimizer = job.optimizer
    # Momentum and Nesterov are settings of SGD alone; other optimizers ignore them.
    sgd = optimizer.name == "SGD"
    if sgd and optimizer.nesterov and optimizer.momentum == 0:
        yield (
            ("optimizer.nesterov", "optimizer.momentum"),
            "needs optimizer.momentum greater than 0; 0.9 is usual",
        )
    if sgd and optimizer.nesterov and optimizer.options.get("dampening"):
        names = ("optimizer.nesterov", "optimizer.options")
        yield names, f"needs optimizer.options.dampening 0, not {optimizer.options['dampening']}"
    # These settings are passed to the constructor too, so an option of the same name would clash.
    for field in ("lr", "weight_decay", *(("momentum", "nesterov") if sgd else ())):
        if field in optimizer.options:
            yield (
                ("optimizer.options",),
                f"holds '{field}', which is a setting of its own; set optimizer.{field}",
            )


def _schedule(job: Job) -> Iterator[Violation]:
    """Check the milestones of the step schedule, the warm-up, and what a name does not take."""
    schedule, milestones = job.schedule, job.schedule.milestones
    if schedule.warmup_steps and schedule.warmup_epochs:
        yield (
            ("schedule.warmup_steps", "schedule.warmup_epochs"),
            f"is {schedule.warmup_steps}, and schedule.warmup_epochs {schedule.warmup_epochs:g}; "
            "set one of them to 0",
        )
    is_own = schedule.name in OWN_SCHEDULES
    for field in ("options", "interval") if is_own else ("final_factor", "milestones", "gamma"):
        if getattr(schedule, field) != getattr(ScheduleConfig(), field):
            advice = (
                "leave it out" if is_own else f"write schedule.options.{field} if that takes it"
            )
            names = (f"schedule.{field}", "schedule.name")
            yield names, f"is nothing that schedule.name {schedule.name} takes; {advice}"
    if any(epoch < 1 for epoch in milestones) or any(a >= b for a, b in pairwise(milestones)):
        yield (
            ("schedule.milestones",),
            f"must be epochs from 1 on in ascending order, not {list(milestones)}",
        )
    if schedule.name == "step" and not milestones:
        names = ("schedule.milestones", "schedule.name")
        yield (
            names,
            "is empty, but schedule.name is step; give epochs such as [30, 60, 90], or choose "
            "constant",
        )


def _data(job: Job) -> Iterator[Violation]:
    """Check the settings that depend on the data set."""
    names: tuple[str, ...]
    classes = job.data.classes if job.data.name == "dummy" else CLASSES.get(job.data.name)
    if classes is not None and job.evaluation.topk > classes:
        names = ("evaluation.topk", "data.classes", "data.name")
        yield names, f"is {job.evaluation.topk}, but {job.data.name} has {classes} classes"
    if job.data.name == "imagefolder" and job.data.resize < job.data.image_size:
        names = ("data.resize", "data.image_size")
        yield (
            names,
            f"is {job.data.resize}, too small to crop data.image_size {job.data.image_size} out of "
            "it",
        )
    for mix, value in (("mixup", job.train.mixup), ("cutmix", job.train.cutmix)):
        if value > 0 and job.data.name in LANGUAGE:
            yield (
                (f"train.{mix}", "data.name"),
                f"mixes images; {job.data.name} is text, so it must be 0",
            )


def _checkpoint(job: Job) -> Iterator[Violation]:
    """Check that an interval of saves can be chosen."""
    if job.checkpoint.every_steps == "auto" and job.checkpoint.job_mtbf is None:
        yield (
            ("checkpoint.every_steps", "checkpoint.job_mtbf"),
            "is auto, which needs checkpoint.job_mtbf, the mean time between failures of the whole "
            "job; set it, as in 12h (that of one rank divided by the ranks), or give a number of "
            "steps",
        )
