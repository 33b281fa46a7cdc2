"""Translation of distribuuuu's command lines: a YAML file, and KEY VALUE pairs on top of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shoal.config.fields import typed
from shoal.config.layers import Layer, find, flag_layer, load
from shoal.config.read import Settings, resolve
from shoal.config.yaml_subset import LocatedValue, parse_flag, write
from shoal.errors import ConfigError, did_you_mean

# Networks in distribuuuu's own code; any other name is timm's. torchvision has all of them except
# botnet50.
OWN_NETWORKS = {
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    *(f"densenet{depth}" for depth in (121, 161, 169, 201)),
    *("resnext50_32x4d", "resnext101_32x8d", "wide_resnet50_2", "wide_resnet101_2", "botnet50"),
}
POLICIES = {"cos": "cosine", "steps": "step"}


class DistribuuuuKey(NamedTuple):
    """One key of distribuuuu's configuration.

    Args:
        default: the value in distribuuuu.
        setting: ours in its place; empty if the key has no meaning here.
        kind: the type of its values, as for `fields.typed`; None for that of the default.
    """

    default: Any
    setting: str = ""
    kind: Any = None


KEYS: Mapping[str, DistribuuuuKey] = {
    "MODEL.ARCH": DistribuuuuKey("resnet18", "model.name"),
    "MODEL.NUM_CLASSES": DistribuuuuKey(1000, "data.classes"),
    "MODEL.PRETRAINED": DistribuuuuKey(False),
    "MODEL.SYNCBN": DistribuuuuKey(False, "model.sync_batchnorm"),
    "MODEL.WEIGHTS": DistribuuuuKey(None, "model.weights", str | None),
    "MODEL.DUMMY_INPUT": DistribuuuuKey(False, "data.name"),
    "TRAIN.BATCH_SIZE": DistribuuuuKey(32, "train.batch_size"),
    "TRAIN.IM_SIZE": DistribuuuuKey(224, "data.image_size"),
    "TRAIN.DATASET": DistribuuuuKey("./data/ILSVRC/", "data.path"),
    "TRAIN.SPLIT": DistribuuuuKey("train", "data.train_split"),
    "TRAIN.AUTO_RESUME": DistribuuuuKey(True, "checkpoint.resume"),
    "TRAIN.LOAD_OPT": DistribuuuuKey(True),
    "TRAIN.WORKERS": DistribuuuuKey(4, "data.workers"),
    "TRAIN.PIN_MEMORY": DistribuuuuKey(True, "data.pin_memory"),
    "TRAIN.PRINT_FREQ": DistribuuuuKey(30, "log.every"),
    "TRAIN.TOPK": DistribuuuuKey(5, "evaluation.topk"),
    "TEST.DATASET": DistribuuuuKey("./data/ILSVRC/"),
    "TEST.SPLIT": DistribuuuuKey("val", "data.validation_split"),
    "TEST.BATCH_SIZE": DistribuuuuKey(200, "evaluation.batch_size"),  # per device, there and here
    "TEST.IM_SIZE": DistribuuuuKey(256, "data.resize"),
    "TEST.PRINT_FREQ": DistribuuuuKey(10),
    "CUDNN.BENCHMARK": DistribuuuuKey(True, "train.cudnn_benchmark"),
    "CUDNN.DETERMINISTIC": DistribuuuuKey(False, "train.deterministic"),
    "OPTIM.MAX_EPOCH": DistribuuuuKey(100, "train.epochs"),
    "OPTIM.LR_POLICY": DistribuuuuKey("cos", "schedule.name", Literal["cos", "steps"]),
    "OPTIM.BASE_LR": DistribuuuuKey(0.2, "optimizer.lr"),
    "OPTIM.MIN_LR": DistribuuuuKey(
        0.0, "schedule.final_factor"
    ),  # a share of BASE_LR, there and here
    "OPTIM.STEPS": DistribuuuuKey((), "schedule.milestones", tuple[int, ...]),
    "OPTIM.LR_MULT": DistribuuuuKey(0.1, "schedule.gamma"),
    "OPTIM.MOMENTUM": DistribuuuuKey(0.9, "optimizer.momentum"),
    "OPTIM.DAMPENING": DistribuuuuKey(0.0, "optimizer.options.dampening"),
    "OPTIM.NESTEROV": DistribuuuuKey(True, "optimizer.nesterov"),
    "OPTIM.WARMUP_FACTOR": DistribuuuuKey(0.1, "schedule.warmup_factor"),
    "OPTIM.WARMUP_EPOCHS": DistribuuuuKey(5, "schedule.warmup_epochs"),
    "OPTIM.WEIGHT_DECAY": DistribuuuuKey(5e-5, "optimizer.weight_decay"),
    "OUT_DIR": DistribuuuuKey("./exp", "out"),
    "CFG_DEST": DistribuuuuKey("config.yaml"),
    "RNG_SEED": DistribuuuuKey(None, "seed", int | None),
}
NO_MEANING = {
    "MODEL.PRETRAINED": "would download weights; give MODEL.WEIGHTS a file instead",
    "TRAIN.LOAD_OPT": "has no meaning here: resuming restores the optimizer too, and "
    "MODEL.WEIGHTS loads weights alone",
    "TEST.DATASET": "has no meaning, nor has it in distribuuuu: TEST.SPLIT lies in TRAIN.DATASET",
    "TEST.PRINT_FREQ": "has no meaning here: an evaluation is one line",
    "CFG_DEST": "has no meaning here: look into OUT_DIR/config.yaml",
}
"""Notes on keys that are given. As all notes they end a sentence that begins with KEY VALUE."""
UNUSUAL = {
    "MODEL.NUM_CLASSES": "counts for dummy data only; an image folder tells its own",
    "MODEL.DUMMY_INPUT": "means random images of 3 x 224 x 224, whatever TRAIN.IM_SIZE says",
    "TRAIN.IM_SIZE": "is the side of an evaluation's crop too, which distribuuuu fixes at 224",
}
"""Notes on values that are not the default."""
CHANGED = {
    "MODEL.ARCH": "is timm's network: {ours}",
    "TRAIN.BATCH_SIZE": "is per device: the global batch is {ours} = {ranks} x {value}",
    "OPTIM.STEPS": "begins with 0, where distribuuuu wants it; the milestones are those behind it",
    "RNG_SEED": "(no seed) becomes {ours}: every run has a seed here",
}
"""Notes on values that are others here."""
NOTES = NO_MEANING | UNUSUAL | CHANGED

# Settings that distribuuuu's code fixes: it has no key for them.
FIXED = {
    "data.shape": (3, 224, 224),
    "data.samples": 1000,
    "train.drop_last": True,
    "optimizer.name": "SGD",
}
SCHEDULE_NOTE = (
    "distribuuuu sets the learning rate once an epoch; here every step has its own, on the same "
    "curve"
)


def translate(
    cfg: str | Path | None, pairs: Sequence[str], ranks: int, flags: Sequence[tuple[str, str]] = ()
) -> tuple[Settings, list[str]]:
    """Return the settings for a command line of distribuuuu, and notes on the differences.

    Args:
        cfg: its YAML file; None for its defaults.
        pairs: KEY, VALUE, KEY, VALUE ...
        ranks: the number of processes that will train. distribuuuu's batch size is that of one.
        flags: Shoal's flags, as for `read`; they come on top.

    Raises:
        ConfigError: all unknown keys, and all values that do not fit.
    """
    problems: list[str] = []
    given: Layer = {} if cfg is None else _from_file(cfg, problems)
    given |= _from_pairs(pairs, problems)
    values = _typed(given, problems)
    ours = _converted(values, ranks)
    layer = _translated(ours, given)
    name = "distribuuuu" if cfg is None else Path(cfg).stem
    layer["name"] = _located(name, str(cfg or "distribuuuu"))
    settings = resolve([layer, flag_layer(flags, problems)], problems)
    return settings, [*_notes(values, ours, given, ranks), SCHEDULE_NOTE]


def _from_file(cfg: str | Path, problems: list[str]) -> Layer:
    """Return the values in a file, by distribuuuu's keys."""
    file = find(Path(cfg), Path(), "--cfg")
    layer: Layer = {}
    for key, located in load(file).items():
        items = {key: located}
        if isinstance(located.value, dict):  # a section: `TRAIN:` with `BATCH_SIZE:` in it
            items = {f"{key}.{name}": item for name, item in located.value.items()}
        for name, item in items.items():
            _add(layer, name, item, problems)
    return layer


def _from_pairs(pairs: Sequence[str], problems: list[str]) -> Layer:
    """Return the values of KEY VALUE pairs, by distribuuuu's keys."""
    layer: Layer = {}
    for key, text in zip(pairs[::2], pairs[1::2], strict=False):
        if text.startswith("(") and text.endswith(")"):
            text = f"[{text[1:-1]}]"  # distribuuuu accepts Python's tuples too
        origin = f"argument {key}"
        try:
            _add(layer, key, parse_flag(text, origin), problems)
        except ConfigError as error:
            problems.extend(error.problems)
    if len(pairs) % 2:
        problems.append(
            f"argument {pairs[-1]}: has no value; distribuuuu's arguments are pairs, KEY VALUE"
        )
    return layer


def _add(layer: Layer, key: str, value: LocatedValue, problems: list[str]) -> None:
    if key in KEYS:
        layer[key] = value
    else:
        problems.append(
            f"{value.origin}: {key} is not a key of distribuuuu's; {did_you_mean(key, KEYS)}"
        )


def _typed(given: Layer, problems: list[str]) -> dict[str, Any]:
    """Return a value for each key; the default where there is none, or one that does not fit."""
    values = {key: row.default for key, row in KEYS.items()}
    for key, item in given.items():
        try:
            values[key] = typed(item, KEYS[key].kind or type(KEYS[key].default))
        except ValueError as error:
            problems.append(f"{item.origin}: {key} {error}")
    if values["MODEL.PRETRAINED"]:
        problems.append(
            f"{given['MODEL.PRETRAINED'].origin}: MODEL.PRETRAINED True "
            f"{NO_MEANING['MODEL.PRETRAINED']}"
        )
    # As in distribuuuu's setup of seeds.
    if values["RNG_SEED"]:
        values["CUDNN.DETERMINISTIC"] = True
    if values["CUDNN.DETERMINISTIC"]:
        values["CUDNN.BENCHMARK"] = False
    return values


def _converted(values: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Return the value of our setting for each key."""
    arch, steps = values["MODEL.ARCH"], values["OPTIM.STEPS"]
    return {
        **values,
        "MODEL.ARCH": arch if arch in OWN_NETWORKS else f"timm:{arch}",
        "MODEL.DUMMY_INPUT": "dummy" if values["MODEL.DUMMY_INPUT"] else "imagefolder",
        "TRAIN.BATCH_SIZE": values["TRAIN.BATCH_SIZE"] * ranks,
        "OPTIM.LR_POLICY": POLICIES[values["OPTIM.LR_POLICY"]],
        # distribuuuu needs a leading 0, which changes nothing.
        "OPTIM.STEPS": steps[1:] if steps[:1] == (0,) else steps,
        "RNG_SEED": values["RNG_SEED"] or 0,
    }


def _translated(ours: Mapping[str, Any], given: Layer) -> Layer:
    """Return the values by the names of our settings."""
    layer = {name: _located(value, "distribuuuu") for name, value in FIXED.items()}
    for key, row in KEYS.items():
        if row.setting:
            origin = given[key].origin if key in given else "distribuuuu's default"
            layer[row.setting] = _located(ours[key], origin)
    return layer


def _notes(
    values: Mapping[str, Any], ours: Mapping[str, Any], given: Layer, ranks: int
) -> Iterator[str]:
    """Yield a note for each key whose meaning here differs from that in distribuuuu."""
    for key, row in KEYS.items():
        value = values[key]
        is_due = (
            (key in NO_MEANING and key in given and key != "MODEL.PRETRAINED")
            or (key in UNUSUAL and value != row.default)
            or (key in CHANGED and value != ours[key])
        )
        if is_due:
            note = NOTES[key].format(value=value, ours=write(ours[key]), ranks=ranks)
            yield f"{key} {write(value)} {note}"
    if values["RNG_SEED"]:
        yield (
            f"RNG_SEED {values['RNG_SEED']} turns CUDNN.DETERMINISTIC on and CUDNN.BENCHMARK off, "
            "as there"
        )


def _located(value: Any, origin: str) -> LocatedValue:
    """Return a value as if it had been parsed."""
    items = [_located(item, origin) for item in value] if isinstance(value, tuple) else value
    return LocatedValue(items, origin, "" if value is None else str(value))
