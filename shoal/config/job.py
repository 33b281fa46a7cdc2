"""A job as data: one frozen dataclass for each section, each field with its meaning and limits.

Nothing here reads a file, the environment or torch. `read.py` fills the dataclasses and reports the
values that do not fit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.config import trace_window
from shoal.costs.cluster import read_time

Check = tuple[Callable[[Any], bool], str]
"""A predicate of a value, and the sentence for the user where it is False."""
POSITIVE: Check = (lambda v: v > 0, "must be greater than 0")
NOT_NEGATIVE: Check = (lambda v: v >= 0, "must not be negative")
BELOW_ONE: Check = (lambda v: 0 <= v < 1, "must be in [0, 1)")
UP_TO_ONE: Check = (lambda v: 0 <= v <= 1, "must be in [0, 1]")
SEED: Check = (lambda v: 0 <= v < 1 << 63, "must be from 0 to 2^63 - 1")
POSITIVE_OR_AUTO: Check = (lambda v: v == "auto" or v > 0, POSITIVE[1])
STEPS: Check = (trace_window.is_window, trace_window.MEANING)
SIZES: Check = (
    lambda v: len(v) > 0 and all(size > 0 for size in v),
    "must be one or more sizes greater than 0",
)


def is_path(text: str) -> bool:
    """Return True for a path that a file system of today can hold."""
    parts = os.fsencode(text).split(b"/")
    return (
        bool(text.strip())
        and all(character >= " " and character != "\x7f" for character in text)
        and len(os.fsencode(text)) < 1024
        and all(len(part) <= 200 for part in parts)
    )


def _is_time(text: str) -> bool:
    """Return True for a time as cluster files have it."""
    try:
        read_time(text)
    except ValueError:
        return False
    return True


TIME: Check = (_is_time, "must be a time greater than 0, such as 12h, 90min or 600s")
# A relative path that stays below the directory in which it begins.
NAME: Check = (
    lambda text: is_path(text) and text[0] != "/" and ".." not in text.split("/"),
    "must be a name of a directory in runs/: not empty, at most 200 bytes, without control "
    "characters, and not leading out by / or ..",
)
PATH: Check = (
    is_path,
    "must be a path: not empty, at most 1,023 bytes and 200 for each name, without control "
    "characters",
)


def setting(default: Any, help: str, check: Check | None = None) -> Any:
    """Return a field with its help text and, where a type is not enough, a check of its value."""
    metadata = {"help": help, "check": check}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelConfig:
    """The network that is trained."""

    name: str = setting(
        "residual_cnn", "ours, torchvision's, 'timm:NAME', or one that --plugin registers"
    )
    options: dict[str, Any] = setting(
        {}, "keyword arguments of the model's constructor; another name starts without"
    )
    weights: str | None = setting(
        None, "weights to start from: safetensors, a directory of them, or torch's state dict", PATH
    )
    empty: bool = setting(
        False, "build without memory, and fill layer by layer: models that no rank has room for"
    )
    channels_last: bool = setting(False, "store images as NHWC, which many convolutions prefer")
    compile: bool = setting(False, "compile the model with torch.compile")
    sync_batchnorm: bool = setting(False, "BatchNorm statistics over all ranks")


@dataclass(frozen=True)
class DataConfig:
    """The data set. Nothing is ever downloaded."""

    name: str = setting(
        "digits",
        "digits, cifar10, cifar100, imagefolder, stdlib, dummy, or one that --plugin registers",
    )
    path: str | None = setting(None, "directory that holds the files; data/NAME if not given", PATH)
    train_split: str = setting("train", "imagefolder: subdirectory of the training images")
    validation_split: str = setting("val", "imagefolder: subdirectory of the validation images")
    image_size: int = setting(
        224, "imagefolder: side of the square that the model sees, in pixels", POSITIVE
    )
    resize: int = setting(
        256,
        "imagefolder: shorter side before the centre crop of an evaluation, in pixels",
        POSITIVE,
    )
    augment: bool = setting(
        True, "random crops and flips of training images, where the data set has them"
    )
    sequence_length: int = setting(256, "stdlib: bytes in one sample", POSITIVE)
    shape: tuple[int, ...] = setting((3, 224, 224), "dummy: shape of one sample", SIZES)
    samples: int = setting(
        1000, "dummy: number of training samples; as many again for validation", POSITIVE
    )
    classes: int = setting(10, "dummy: number of classes", POSITIVE)
    workers: int = setting(0, "data-loader processes per rank", NOT_NEGATIVE)
    pin_memory: bool = setting(True, "copy batches through pinned memory (CUDA only)")


@dataclass(frozen=True)
class TrainConfig:
    """Length, batch, precision."""

    epochs: int = setting(10, "passes over the data", POSITIVE)
    max_steps: int | None = setting(
        None, "stop after this many steps, whatever train.epochs says", POSITIVE
    )
    batch_size: int = setting(
        128, "samples in one optimizer step, over all ranks and micro-batches", POSITIVE
    )
    accumulate: int = setting(
        1,
        "micro-batches of each rank's share of a batch, one after the other",
        POSITIVE,
    )
    drop_last: bool = setting(False, "leave out the last batch of an epoch where it is smaller")
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = setting(
        "fp32", "fp32; bf16 and fp16 are autocast; fp64 for proofs"
    )
    draws: Literal["rank", "global"] = setting(
        "rank",
        "random numbers of a step, such as dropout masks: rank, a stream of each rank's own; "
        "global, those of one device, which takes time",
    )
    nonfinite: Literal["skip", "stop", "ignore"] = setting(
        "skip",
        "step whose loss or gradients are NaN or infinite on any rank: skip, all ranks leave it "
        "out; stop, the run ends; ignore, it is taken",
    )
    max_nonfinite: int = setting(10, "skipped steps in a row that end the run", POSITIVE)
    check_replicas: int | None = setting(
        100,
        "steps between comparisons of the weights' bits on ranks that hold the same; also before "
        "each save",
        POSITIVE,
    )
    hang_limit_s: float = setting(
        60.0,
        "seconds without a sign of a rank after which `shoal train -n` restarts all from the "
        "newest checkpoint; ten times as long in a first step; 0 for no limit",
        NOT_NEGATIVE,
    )
    accept_data: Literal["same", "changed"] = setting(
        "same",
        "data that a resumed run goes on with: same, else it is refused; changed, whatever it is",
    )
    clip_norm: float | None = setting(None, "largest global norm of the gradients", POSITIVE)
    label_smoothing: float = setting(0.0, "share of the target spread over all classes", BELOW_ONE)
    mixup: float = setting(0.0, "alpha of mixup; 0 is off", NOT_NEGATIVE)
    cutmix: float = setting(
        0.0, "alpha of cutmix; 0 is off; with mixup, each sample takes one of the two", NOT_NEGATIVE
    )
    ema: float = setting(
        0.0, "decay of the moving average of the weights that is evaluated; 0 is off", BELOW_ONE
    )
    record: bool = setting(
        False,
        "parameter servers with staleness: keep in what order pushes are applied, for `shoal "
        "replay`",
    )
    deterministic: bool = setting(
        False, "only kernels that give the same bits in every run, even if slower (CUDA only)"
    )
    cudnn_benchmark: bool = setting(
        False, "time cuDNN's kernels and keep the fastest, run by run (CUDA only)"
    )

    @property
    def soft_targets(self) -> str:
        """Return the settings because of which training and validation losses are not comparable.

        Each of them spreads the target of a sample over several classes, in training only. The
        text is empty where none is on.
        """
        values = {
            "label smoothing": self.label_smoothing,
            "mixup": self.mixup,
            "cutmix": self.cutmix,
        }
        return ", ".join(f"{name} {value:g}" for name, value in values.items() if value)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its options."""

    name: str = setting(
        "SGD", "SGD, AdamW or any other name in torch.optim; AdamW8bit, with shoal[lean]"
    )
    lr: float = setting(
        0.1, "learning rate for a batch of optimizer.reference_batch samples", POSITIVE
    )
    reference_batch: int | None = setting(
        None, "scale the rate by batch_size / reference_batch; none: as it stands", POSITIVE
    )
    momentum: float = setting(0.9, "SGD: momentum", BELOW_ONE)
    nesterov: bool = setting(False, "SGD: Nesterov's momentum")
    weight_decay: float = setting(0.0, "weight decay", NOT_NEGATIVE)
    decay_norm_and_bias: bool = setting(True, "apply weight decay to biases and norm layers too")
    options: dict[str, Any] = setting(
        {}, "further keyword arguments of the optimizer; another name starts without"
    )


OWN_SCHEDULES = ("cosine", "step", "constant")
"""Names of `schedule.name`; any other one is a class of torch.optim.lr_scheduler."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over time; set before every step."""

    name: str = setting(
        "cosine",
        "shape after the warm-up: cosine, step, constant, or a class of torch.optim.lr_scheduler",
    )
    options: dict[str, Any] = setting(
        {}, "keyword arguments of that class; another name starts without"
    )
    interval: Literal["epoch", "step"] = setting("epoch", "how often that class takes a step")
    warmup_epochs: float = setting(0.0, "epochs of linear warm-up", NOT_NEGATIVE)
    warmup_steps: int = setting(0, "steps of linear warm-up, in place of epochs", NOT_NEGATIVE)
    warmup_factor: float = setting(
        0.1, "share of the learning rate that the warm-up starts from", UP_TO_ONE
    )
    final_factor: float = setting(
        0.0, "cosine: share of the learning rate that it ends at", NOT_NEGATIVE
    )
    milestones: tuple[int, ...] = setting(
        (), "step: epochs at which the rate is multiplied by schedule.gamma"
    )
    gamma: float = setting(0.1, "step: the multiplier", POSITIVE)


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation, exact at any number of ranks."""

    every: int = setting(
        1, "epochs between evaluations; the last epoch is always evaluated", POSITIVE
    )
    batch_size: int = setting(200, "samples in one forward pass on one rank", POSITIVE)
    topk: int = setting(5, "k of the second accuracy", POSITIVE)


@dataclass(frozen=True)
class CheckpointConfig:
    """Saves; a killed run costs at most the interval between two."""

    every_epochs: int = setting(1, "epochs between checkpoints", POSITIVE)
    every_steps: int | Literal["auto"] | None = setting(
        None,
        "steps between further checkpoints; auto: the interval that loses least, from "
        "checkpoint.job_mtbf and the times of saves and steps",
        POSITIVE_OR_AUTO,
    )
    job_mtbf: str | None = setting(
        None, "mean time between failures of the whole job, for every_steps auto: 12h, say", TIME
    )
    keep: int = setting(3, "how many verified checkpoints stay; the best one stays too", POSITIVE)
    asynchronous: bool = setting(False, "save beside training; the last save is waited for")
    last_save_wait_s: int = setting(
        300, "seconds in which a last save that failed is tried again", NOT_NEGATIVE
    )
    fast_dir: str | None = setting(
        None, "a further directory for frequent saves, such as /dev/shm; a start looks there too"
    )
    fast_every_steps: int = setting(10, "steps between saves in fast_dir", POSITIVE)
    resume: bool = setting(True, "go on from the newest good checkpoint in the run directory")


@dataclass(frozen=True)
class LogConfig:
    """The records that are written during the run."""

    every: int = setting(10, "steps between lines of metrics.jsonl", POSITIVE)
    tensorboard: bool = setting(True, "write TensorBoard events")
    loggers: tuple[str, ...] = setting(
        (), "more places for the metrics: wandb, mlflow, trackio, each by its own settings"
    )
    trace: str | None = setting(
        None,
        "steps to trace into trace.json, as N@S: N, after the first S of this start; see `shoal "
        "trace`",
        STEPS,
    )


@dataclass(frozen=True)
class Job:
    """One experiment with all settings. On 1 and on 64 ranks it is the same experiment."""

    name: str = setting(
        "job", "name of the run; its directory is runs/NAME unless --out says otherwise", NAME
    )
    seed: int = setting(0, "from which every random number follows", SEED)
    strategy: str = setting(
        "ddp",
        "how ranks train one model: single, dataparallel, ddp, zero1, zero2, zero3, tensor=T, "
        "pipeline=P, server=N, local=H, diloco=H, recompute=K; commas join several; auto, as shoal "
        "plan",
    )
    out: str | None = setting(None, "run directory; runs/NAME if not given", PATH)
    plugins: tuple[str, ...] = setting(
        (),
        "Python files with dicts `models` (called with num_classes and input_shape by keyword) and "
        "`data`",
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def directory(self) -> str:
        """Return the run directory."""
        return self.out or f"runs/{self.name}"
