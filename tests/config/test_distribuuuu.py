from pathlib import Path

import pytest

from shoal.config import read, translate
from shoal.config.distribuuuu import KEYS, NO_MEANING
from shoal.config.fields import all_settings, open_setting
from shoal.errors import ConfigError

# One of its seven files, in its own words: all 38 keys.
RESNET18 = """\
CFG_DEST: config.yaml
CUDNN: {BENCHMARK: true, DETERMINISTIC: false}
MODEL: {ARCH: resnet18, DUMMY_INPUT: false, NUM_CLASSES: 1000, PRETRAINED: false, WEIGHTS: null}
OPTIM:
  BASE_LR: 0.2
  DAMPENING: 0.0
  LR_MULT: 0.1
  LR_POLICY: cos
  MAX_EPOCH: 100
  MIN_LR: 0.0
  MOMENTUM: 0.9
  NESTEROV: true
  STEPS: []
  WARMUP_EPOCHS: 5
  WARMUP_FACTOR: 0.1
  WEIGHT_DECAY: 5.0e-05
OUT_DIR: ./exp
RNG_SEED: null
TEST: {BATCH_SIZE: 200, DATASET: ./data/ILSVRC/, IM_SIZE: 256, PRINT_FREQ: 10, SPLIT: val}
TRAIN:
  AUTO_RESUME: true
  BATCH_SIZE: 32
  DATASET: ./data/ILSVRC/
  IM_SIZE: 224
  LOAD_OPT: true
  PIN_MEMORY: true
  PRINT_FREQ: 30
  SPLIT: train
  TOPK: 5
  WORKERS: 4
"""


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("resnet18.yaml").write_text(RESNET18)
    return Path("resnet18.yaml")


def problems(cfg: Path | None, *pairs: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        translate(cfg, pairs, ranks=1)
    return list(error.value.problems)


def test_all_38_keys_have_a_row_and_lead_to_settings_that_exist() -> None:
    assert len(KEYS) == 38
    for key, row in KEYS.items():
        assert not row.setting or row.setting in all_settings() or open_setting(row.setting)
        assert row.setting or key in NO_MEANING


def test_its_defaults_are_those_of_its_files(cfg: Path) -> None:
    from_file, from_defaults = translate(cfg, [], 8)[0], translate(None, [], 8)[0]
    assert from_file.job == translate(None, [], 8, [("name", "resnet18")])[0].job
    assert from_defaults.job.name == "distribuuuu"
    assert from_defaults.origins["train.epochs"] == "distribuuuu's default"


def test_our_imagenet_recipe_is_the_translated_one(cfg: Path) -> None:
    theirs, ours = translate(cfg, [], ranks=8)[0].job, read("imagenet_resnet18").job
    assert theirs.schedule == ours.schedule
    assert (theirs.train.epochs, theirs.train.batch_size, theirs.train.drop_last) == (
        100,
        256,
        True,
    )
    assert (ours.train.epochs, ours.train.batch_size, ours.train.drop_last) == (100, 256, True)
    assert ours.optimizer.reference_batch is not None
    scaled = ours.optimizer.lr * ours.train.batch_size / ours.optimizer.reference_batch
    assert scaled == pytest.approx(theirs.optimizer.lr)
    for field in ("name", "momentum", "nesterov", "weight_decay", "decay_norm_and_bias"):
        assert getattr(theirs.optimizer, field) == getattr(ours.optimizer, field)
    assert (theirs.data.image_size, theirs.data.resize) == (ours.data.image_size, ours.data.resize)


def test_keys_without_meaning_are_named_with_the_reason(cfg: Path) -> None:
    _, notes = translate(cfg, [], ranks=1)
    meaningless = [note.partition(" ")[0] for note in notes if "has no meaning" in note]
    assert meaningless == ["TRAIN.LOAD_OPT", "TEST.DATASET", "TEST.PRINT_FREQ", "CFG_DEST"]
    assert notes[-1].startswith("distribuuuu sets the learning rate once an epoch")


@pytest.mark.parametrize(
    ("pairs", "name", "value"),
    [
        ("MODEL.ARCH regnetx_160", "model.name", "timm:regnetx_160"),
        ("MODEL.ARCH botnet50", "model.name", "botnet50"),
        ("MODEL.SYNCBN True", "model.sync_batchnorm", "true"),
        ("MODEL.WEIGHTS best.pth.tar", "model.weights", "best.pth.tar"),
        ("MODEL.WEIGHTS None", "model.weights", "none"),
        ("MODEL.DUMMY_INPUT True MODEL.NUM_CLASSES 20", "data.classes", "20"),
        ("MODEL.DUMMY_INPUT True", "data.name", "dummy"),
        ("TRAIN.AUTO_RESUME False", "checkpoint.resume", "false"),
        ("TRAIN.PRINT_FREQ 7", "log.every", "7"),
        ("TRAIN.TOPK 3", "evaluation.topk", "3"),
        ("TEST.SPLIT test", "data.validation_split", "test"),
        ("OPTIM.MIN_LR 0.01", "schedule.final_factor", "0.01"),
        ("OPTIM.WARMUP_FACTOR 1.0", "schedule.warmup_factor", "1.0"),
        ("OPTIM.STEPS [0,30,60] OPTIM.LR_POLICY steps", "schedule.milestones", "[30, 60]"),
        ("OPTIM.STEPS (30,60) OPTIM.LR_POLICY steps", "schedule.name", "step"),
        ("OPTIM.DAMPENING 0.1 OPTIM.NESTEROV False", "optimizer.options.dampening", "0.1"),
        ("CUDNN.DETERMINISTIC True", "train.cudnn_benchmark", "false"),
        ("RNG_SEED 3", "train.deterministic", "true"),
        ("RNG_SEED 3", "seed", "3"),
    ],
)
def test_a_key_becomes_the_setting_that_means_the_same(pairs: str, name: str, value: str) -> None:
    translated = translate(None, pairs.split(), 1)[0].job
    assert translated == translate(None, pairs.split(), 1, [(name, value)])[0].job


def test_flags_of_ours_come_on_top(cfg: Path) -> None:
    settings, _ = translate(
        cfg, ["OPTIM.MAX_EPOCH", "3"], 2, [("train.epochs", "4"), ("strategy", "single")]
    )
    assert (settings.job.train.epochs, settings.job.strategy) == (4, "single")
    assert settings.origins["train.epochs"] == "flag --train.epochs"


def test_all_problems_are_reported_at_once(cfg: Path) -> None:
    cfg.write_text("TRAIN:\n  BATCHSIZE: 3\n  WORKERS: many\nOPTIM: 3\n")
    assert problems(
        cfg,
        "MODEL.ARC",
        "x",
        "OPTIM.LR_POLICY",
        "exp",
        "MODEL.PRETRAINED",
        "True",
        "OPTIM.STEPS",
        "[",
        "OUT_DIR",
    ) == [
        "resnet18.yaml:2: TRAIN.BATCHSIZE is not a key of distribuuuu's; did you mean "
        "'TRAIN.BATCH_SIZE'?",
        "resnet18.yaml:4: OPTIM is not a key of distribuuuu's; did you mean 'OPTIM.STEPS'?",
        "argument MODEL.ARC: MODEL.ARC is not a key of distribuuuu's; did you mean 'MODEL.ARCH'?",
        "argument OPTIM.STEPS: not YAML: expected the node content, but found '<stream end>'",
        "argument OUT_DIR: has no value; distribuuuu's arguments are pairs, KEY VALUE",
        "resnet18.yaml:3: TRAIN.WORKERS must be a whole number, not many",
        "argument OPTIM.LR_POLICY: OPTIM.LR_POLICY must be one of cos, steps, not exp",
        "argument MODEL.PRETRAINED: MODEL.PRETRAINED True would download weights; give "
        "MODEL.WEIGHTS a file instead",
    ]


def test_limits_of_our_settings_hold_for_their_keys_too() -> None:
    assert problems(None, "TRAIN.BATCH_SIZE", "0") == [
        "argument TRAIN.BATCH_SIZE: train.batch_size must be greater than 0, not 0"
    ]


def test_a_file_that_does_not_exist_is_named() -> None:
    assert problems(Path("no.yaml"))[0].startswith("--cfg: 'no.yaml' is neither a file")
