import pytest

from shoal.config import read
from shoal.errors import ConfigError

# Flags that break a rule, and the text of the error.
BROKEN = {
    "train.accumulate=3 train.batch_size=2": (
        "train.accumulate is 3, more parts than the 2 samples of train.batch_size"
    ),
    "train.deterministic=true train.cudnn_benchmark=true": (
        "train.cudnn_benchmark may choose other kernels"
    ),
    "optimizer.nesterov=true optimizer.momentum=0": (
        "optimizer.nesterov needs optimizer.momentum greater than 0"
    ),
    "optimizer.nesterov=true optimizer.options.dampening=0.1": (
        "needs optimizer.options.dampening 0, not 0.1"
    ),
    "optimizer.options.lr=1": (
        "optimizer.options holds 'lr', which is a setting of its own; set optimizer.lr"
    ),
    "schedule.milestones=[30,30]": (
        "schedule.milestones must be epochs from 1 on in ascending order, not [30, 30]"
    ),
    "schedule.milestones=[0,30]": (
        "schedule.milestones must be epochs from 1 on in ascending order, not [0, 30]"
    ),
    "schedule.warmup_steps=50 schedule.warmup_epochs=2": (
        "schedule.warmup_steps is 50, and schedule.warmup_epochs 2; set one of them to 0"
    ),
    "schedule.options.step_size=3": "is nothing that schedule.name cosine takes; leave it out",
    "schedule.interval=step": "is nothing that schedule.name cosine takes; leave it out",
    "schedule.name=StepLR schedule.gamma=0.5": (
        "schedule.gamma is nothing that schedule.name StepLR takes; write schedule.options.gamma"
    ),
    "schedule.name=step": "schedule.milestones is empty, but schedule.name is step",
    "data.name=dummy data.classes=2": "evaluation.topk is 5, but dummy has 2 classes",
    "evaluation.topk=11": "evaluation.topk is 11, but digits has 10 classes",
    "data.name=imagefolder data.image_size=288": (
        "data.resize is 256, too small to crop data.image_size 288 out of it"
    ),
    "data.name=stdlib train.mixup=0.2": "train.mixup mixes images; stdlib is text, so it must be 0",
    "checkpoint.every_steps=auto": "which needs checkpoint.job_mtbf, the mean time between",
    "checkpoint.every_steps=often": "must be a whole number, auto or none, not often",
    "checkpoint.every_steps=0": "checkpoint.every_steps must be greater than 0, not 0",
    "checkpoint.job_mtbf=-12h": (
        "checkpoint.job_mtbf must be a time greater than 0, such as 12h, 90min or 600s, not -12h"
    ),
    "checkpoint.job_mtbf=long": "checkpoint.job_mtbf must be a time greater than 0",
    "data.shape=[3,0]": "data.shape must be one or more sizes greater than 0, not [3, 0]",
    "name=''": "name must be a name of a directory in runs/",
}


@pytest.mark.parametrize("flags", BROKEN)
def test_what_does_not_fit_together_is_refused(flags: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(None, [(flag.partition("=")[0], flag.partition("=")[2]) for flag in flags.split()])
    (problem,) = error.value.problems
    assert problem.startswith("flag --")
    assert BROKEN[flags] in problem


def test_a_value_that_somebody_gave_takes_the_blame_not_a_default() -> None:
    with pytest.raises(
        ConfigError, match=r"flag --data\.classes: evaluation\.topk is 5, but dummy has 2 classes"
    ):
        read(None, [("data.name", "dummy"), ("data.classes", "2")])


def test_a_rule_does_not_speak_of_a_value_that_could_not_be_read() -> None:
    with pytest.raises(ConfigError) as error:
        read(None, [("schedule.name", "step"), ("schedule.milestones", "soon")])
    assert list(error.value.problems) == [
        "flag --schedule.milestones: schedule.milestones must be a whole number, not soon"
    ]
