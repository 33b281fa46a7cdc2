"""The 38 keys of distribuuuu's configuration, each with the setting of ours that replaces it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Networks in distribuuuu's own code; any other name is timm's. torchvision has all of them except
# botnet50.
OWN_NETWORKS = {
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    *(f"densenet{depth}" for depth in (121, 161, 169, 201)),
    *("resnext50_32x4d", "resnext101_32x8d", "wide_resnet50_2", "wide_resnet101_2", "botnet50"),
}
POLICIES = {"cos": "cosine", "steps": "step"}


@dataclass(frozen=True)
class DistribuuuuKey:
    """One key of distribuuuu.

    Args:
        default: the value in distribuuuu.
        kind: the type of its values, as for `shoal.config.convert.typed`.
        setting: our setting; empty if the key has no meaning here.
        convert: (its value, number of ranks) -> the value of our setting.
        note: the rest of a sentence that begins with `KEY VALUE`. It may contain {value}, {ours}
            and {ranks}.
        note_when: when the note is printed. `given`: the key is in the file or on the command
            line. `unusual`: its value is not the default. `changed`: `convert` returned another
            value. `never`: the note is in the documentation only.
    """

    default: Any
    kind: Any
    setting: str
    convert: Callable[[Any, int], Any] = lambda value, ranks: value
    note: str = ""
    note_when: Literal["given", "unusual", "changed", "never"] = "never"


# The functions below are `convert` of one key each; the second parameter is the number of ranks.


def global_batch(per_device: int, ranks: int) -> int:
    return per_device * ranks


def network(name: str, ranks: int) -> str:
    return name if name in OWN_NETWORKS else f"timm:{name}"


def data_set(dummy: bool, ranks: int) -> str:
    return "dummy" if dummy else "imagefolder"


def policy(name: str, ranks: int) -> str:
    return POLICIES[name]


def milestones(steps: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the epochs without a leading 0, which distribuuuu needs and which changes nothing."""
    return steps[1:] if steps[:1] == (0,) else steps


def seed(value: int | None, ranks: int) -> int:
    return value or 0


MODEL = {
    "MODEL.ARCH": DistribuuuuKey(
        "resnet18", str, "model.name", network, "is timm's network: {ours}", "changed"
    ),
    "MODEL.NUM_CLASSES": DistribuuuuKey(
        1000,
        int,
        "data.classes",
        note="counts for dummy data only; an image folder tells its own",
        note_when="unusual",
    ),
    "MODEL.PRETRAINED": DistribuuuuKey(
        False, bool, "", note="would download weights; give MODEL.WEIGHTS a file instead"
    ),
    "MODEL.SYNCBN": DistribuuuuKey(False, bool, "model.sync_batchnorm"),
    "MODEL.WEIGHTS": DistribuuuuKey(None, str | None, "model.weights"),
    "MODEL.DUMMY_INPUT": DistribuuuuKey(
        False,
        bool,
        "data.name",
        data_set,
        note="means random images of 3 x 224 x 224, whatever TRAIN.IM_SIZE says",
        note_when="unusual",
    ),
}
TRAIN = {
    "TRAIN.BATCH_SIZE": DistribuuuuKey(
        32,
        int,
        "train.batch_size",
        global_batch,
        note="is per device: the global batch is {ours} = {ranks} x {value}",
        note_when="changed",
    ),
    "TRAIN.IM_SIZE": DistribuuuuKey(
        224,
        int,
        "data.image_size",
        note="is the side of an evaluation's crop too, which distribuuuu fixes at 224",
        note_when="unusual",
    ),
    "TRAIN.DATASET": DistribuuuuKey("./data/ILSVRC/", str, "data.path"),
    "TRAIN.SPLIT": DistribuuuuKey("train", str, "data.train_split"),
    "TRAIN.AUTO_RESUME": DistribuuuuKey(True, bool, "checkpoint.resume"),
    "TRAIN.LOAD_OPT": DistribuuuuKey(
        True,
        bool,
        "",
        note="has no meaning here: resuming restores the optimizer too, and MODEL.WEIGHTS loads "
        "weights alone",
        note_when="given",
    ),
    "TRAIN.WORKERS": DistribuuuuKey(4, int, "data.workers"),
    "TRAIN.PIN_MEMORY": DistribuuuuKey(True, bool, "data.pin_memory"),
    "TRAIN.PRINT_FREQ": DistribuuuuKey(30, int, "log.every"),
    "TRAIN.TOPK": DistribuuuuKey(5, int, "evaluation.topk"),
}
TEST = {
    "TEST.DATASET": DistribuuuuKey(
        "./data/ILSVRC/",
        str,
        "",
        note="has no meaning, nor has it in distribuuuu: TEST.SPLIT lies in TRAIN.DATASET",
        note_when="given",
    ),
    "TEST.SPLIT": DistribuuuuKey("val", str, "data.validation_split"),
    "TEST.BATCH_SIZE": DistribuuuuKey(
        200, int, "evaluation.batch_size", note="is per device, there and here"
    ),
    "TEST.IM_SIZE": DistribuuuuKey(256, int, "data.resize"),
    "TEST.PRINT_FREQ": DistribuuuuKey(
        10, int, "", note="has no meaning here: an evaluation is one line", note_when="given"
    ),
}
CUDNN = {
    "CUDNN.BENCHMARK": DistribuuuuKey(
        True,
        bool,
        "train.cudnn_benchmark",
        note="gives way to CUDNN.DETERMINISTIC and to a seed other than 0",
    ),
    "CUDNN.DETERMINISTIC": DistribuuuuKey(
        False, bool, "train.deterministic", note="is on with a seed other than 0, as there"
    ),
}
OPTIM = {
    "OPTIM.MAX_EPOCH": DistribuuuuKey(100, int, "train.epochs"),
    "OPTIM.LR_POLICY": DistribuuuuKey("cos", Literal["cos", "steps"], "schedule.name", policy),
    "OPTIM.BASE_LR": DistribuuuuKey(
        0.2, float, "optimizer.lr", note="is used as it stands, whatever the batch"
    ),
    "OPTIM.MIN_LR": DistribuuuuKey(
        0.0, float, "schedule.final_factor", note="is a share of BASE_LR, there and here"
    ),
    "OPTIM.STEPS": DistribuuuuKey(
        (),
        tuple[int, ...],
        "schedule.milestones",
        milestones,
        note="begins with 0, where distribuuuu wants it; the milestones are those behind it",
        note_when="changed",
    ),
    "OPTIM.LR_MULT": DistribuuuuKey(0.1, float, "schedule.gamma"),
    "OPTIM.MOMENTUM": DistribuuuuKey(0.9, float, "optimizer.momentum"),
    "OPTIM.DAMPENING": DistribuuuuKey(0.0, float, "optimizer.options.dampening"),
    "OPTIM.NESTEROV": DistribuuuuKey(True, bool, "optimizer.nesterov"),
    "OPTIM.WARMUP_FACTOR": DistribuuuuKey(0.1, float, "schedule.warmup_factor"),
    "OPTIM.WARMUP_EPOCHS": DistribuuuuKey(5, int, "schedule.warmup_epochs"),
    "OPTIM.WEIGHT_DECAY": DistribuuuuKey(5e-5, float, "optimizer.weight_decay"),
}
OTHER = {
    "OUT_DIR": DistribuuuuKey("./exp", str, "out"),
    "CFG_DEST": DistribuuuuKey(
        "config.yaml",
        str,
        "",
        note="has no meaning here: look into OUT_DIR/config.yaml",
        note_when="given",
    ),
    "RNG_SEED": DistribuuuuKey(
        None,
        int | None,
        "seed",
        seed,
        "(no seed) becomes {ours}: every run has a seed here",
        "changed",
    ),
}

KEYS: Mapping[str, DistribuuuuKey] = MODEL | TRAIN | TEST | CUDNN | OPTIM | OTHER
