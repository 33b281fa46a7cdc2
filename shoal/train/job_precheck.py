"""Checks of a job that need neither torch nor its data, made before any process is started.

Ranks make the same checks, and more, when they build the model and read the data. What they find
costs seconds, on every rank.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from shoal.config.job import OWN_SCHEDULES, Job, is_path
from shoal.errors import did_you_mean
from shoal.loggers import problems_of
from shoal.platform.optional_packages import missing_for

SOURCES = ("digits", "cifar10", "cifar100", "imagefolder", "stdlib", "dummy")
OUR_MODELS = ("mlp", "residual_cnn", "cifar_resnet18", "botnet50", "lstm", "gpt")
TORCHVISION_MODELS = ("cifar_resnet18", "botnet50")
"""Models of ours that are made of torchvision's."""
NO_OPTIMIZERS = {"Optimizer", "lr_scheduler", "swa_utils", "swap_in_optimizer_params_and_state"}
OBJECTS = "takes functions or other schedulers, which no setting holds"
REFUSED_SCHEDULES = {
    "ReduceLROnPlateau": "follows a measured value; here the rate is a function of the step alone, "
    "so that a resumed run has the same",
    **dict.fromkeys(("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"), OBJECTS),
}


def problems(job: Job) -> list[str]:
    """Return a line for each thing that a job names and that is not there."""
    found = [*_strategy(job), *_plugins(job), *_weights(job), *_optimizer(job), *_schedule(job)]
    found += _packages(job)
    if not job.plugins:  # otherwise its files may register the names
        found += [*_data(job), *_model(job)]
    return found


def _packages(job: Job) -> Iterator[str]:
    """Yield a sentence for each package that is needed and not installed."""
    name = job.model.name
    if find_spec("torch") is None:
        return  # a login node, which only submits the job
    if name.startswith("timm:"):
        yield from missing_for("model.name", ("timm", "torchvision"))
    elif name in TORCHVISION_MODELS or (name not in OUR_MODELS and not job.plugins):
        yield from missing_for("model.name", ("torchvision",))
    if job.data.name in ("cifar10", "cifar100", "imagefolder"):
        yield from missing_for("data.name", ("torchvision", "PIL"))
    for name in {*job.log.loggers} & {"jsonl", "tensorboard"}:
        yield f"log.loggers: {name} is written by itself; log.tensorboard says whether events are"
    yield from (f"log.loggers: {problem}" for problem in problems_of([*job.log.loggers]))
    if job.optimizer.name == "AdamW8bit":
        yield from missing_for("optimizer.name", ("torchao",))


def _plugins(job: Job) -> Iterator[str]:
    for name in job.plugins:
        path = Path(name)
        if not is_path(name) or not path.is_file():
            yield f"--plugin {name}: there is no such file"
            continue
        try:
            text = path.read_bytes()
            ast.parse(text, name)
        except (SyntaxError, ValueError, RecursionError, OSError) as error:
            yield f"--plugin {name}: is no Python file: {error}"
            continue
        # A name may be assigned in any way, so only files that never mention one are refused here.
        if not re.search(rb"\b(models|data)\b|import \*", text):
            yield f"--plugin {name}: it defines neither a `models` nor a `data` dict"


def _strategy(job: Job) -> Iterator[str]:
    for word in job.strategy.split(","):
        module, colon, _ = word.strip().partition("=")[0].partition(":")
        if colon and find_spec(module.partition(".")[0]) is None:
            yield f"strategy: there is no module {module} on the Python path"


def _weights(job: Job) -> Iterator[str]:
    if job.model.weights is not None:
        path = Path(job.model.weights)
        stored = (path / "model.safetensors", path / "model.safetensors.index.json")
        if not path.is_file() and not any(each.is_file() for each in stored):
            yield f"model.weights: there is no file {path}, and no model.safetensors below it"


def _data(job: Job) -> Iterator[str]:
    name = job.data.name
    if name not in SOURCES:
        yield f"data.name: there is no data set '{name}'; {did_you_mean(name, SOURCES)}"
    yield from absent_files(job)


def absent_files(job: Job) -> list[str]:
    """Return a line for each directory of images that is not there."""
    name = job.data.name
    if name not in ("cifar10", "cifar100", "imagefolder"):
        return []
    root = Path(job.data.path or f"data/{name}").expanduser()
    splits = (job.data.train_split, job.data.validation_split) if name == "imagefolder" else ("",)
    files = name.replace("cifar", "cifar-")
    return [
        f"data.path: there is no directory {root / split} with the files of {files}"
        for split in splits
        if not (root / split).is_dir()
    ]


def _optimizer(job: Job) -> Iterator[str]:
    """Check the name by the list in torch.optim's file, for to import torch takes seconds."""
    name = job.optimizer.name
    listed = re.search(r"__all__ = \[(.*?)\]", _text_in_torch("optim/__init__.py"), re.DOTALL)
    known = set(re.findall(r'"(\w+)"', listed[1]) if listed else ()) - NO_OPTIMIZERS
    if name == "LBFGS":
        yield "optimizer.name: LBFGS evaluates the loss several times in a step; a loop cannot."
    elif known and name not in known | {"AdamW8bit"}:
        yield f"optimizer.name: '{name}' is not in torch.optim; {did_you_mean(name, known)}"


def _schedule(job: Job) -> Iterator[str]:
    """Check a class of torch.optim.lr_scheduler, and its options, by the text of its file."""
    schedule = job.schedule
    tree = ast.parse(_text_in_torch("optim/lr_scheduler.py"))
    classes = {c.name: c for c in tree.body if isinstance(c, ast.ClassDef) and c.name[0] != "_"}
    if schedule.name in OWN_SCHEDULES or not classes:
        return
    if reason := REFUSED_SCHEDULES.get(schedule.name):
        yield f"schedule.name: {schedule.name} {reason}; choose another one"
        return
    known = {*OWN_SCHEDULES, *classes} - {*REFUSED_SCHEDULES, "LRScheduler"}
    if schedule.name not in known:
        hint = did_you_mean(schedule.name, known)
        yield f"schedule.name: '{schedule.name}' is not in torch.optim.lr_scheduler; {hint}"
        return
    body = classes[schedule.name].body
    (made,) = (f.args for f in body if isinstance(f, ast.FunctionDef) and f.name == "__init__")
    names = [argument.arg for argument in made.args]
    options = [name for name in names[2:] if name != "last_epoch"]  # behind self and optimizer
    for name in schedule.options.keys() - options:
        hint = did_you_mean(name, options)
        yield f"schedule.options.{name}: {schedule.name} has no such option; {hint}"
    for name in names[2 : len(names) - len(made.defaults)]:
        if name not in schedule.options:
            yield f"schedule.options.{name}: {schedule.name} needs this option"
    if "cycle_momentum" in options and schedule.options.get("cycle_momentum") is not False:
        yield (
            f"schedule.options.cycle_momentum: {schedule.name} would change the momentum too, and "
            "schedules set the rate alone; set it to false"
        )


def _text_in_torch(file: str) -> str:
    """Return the text of a file of torch; empty where there is none, as on a login node."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return ""
    return Path(spec.submodule_search_locations[0], file).read_text(encoding="utf-8")


def _model(job: Job) -> Iterator[str]:
    """Refuse a name that no file of a library has. Ranks know which of them are models."""
    name = job.model.name
    is_word = re.fullmatch(r"(timm:)?[A-Za-z_][\w.\-]{0,99}", name, re.ASCII) is not None
    if name not in OUR_MODELS and not (is_word and _is_mentioned(name.removeprefix("timm:"))):
        known = [*OUR_MODELS, "torchvision's (resnet18...)", "timm:NAME"]
        yield f"model.name: there is no model '{name}'; {did_you_mean(name, known)}"


def _is_mentioned(name: str) -> bool:
    """Return True if a file of a library's models defines `name`, or has it as a string.

    True also where a library is absent, as on a login node.
    """
    forms = [form.encode() for form in (f"\ndef {name}(", f'"{name}"', f"'{name}'")]
    for library in ("torchvision", "timm"):
        spec = find_spec(library)
        if spec is None or not spec.submodule_search_locations:
            return True
        for file in Path(spec.submodule_search_locations[0], "models").glob("*.py"):
            text = file.read_bytes()
            if any(form in text for form in forms):
                return True
    return False
