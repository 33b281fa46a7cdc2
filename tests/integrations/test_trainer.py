"""`ShoalTrainer`: the numbers of transformers' own Trainer on one process, under each strategy."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import CheckpointError, UsageError
from shoal.testing import world

pytest.importorskip("transformers", reason="pip install shoal[hf]")
pytest.importorskip("accelerate", reason="pip install shoal[hf]")

import trainer_job
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-5
"""Models of transformers compute their losses in float32."""


@cache
def expected(accumulation: int, job: str = "llama", workers: int = 0) -> dict[str, list[float]]:
    settings = {"gradient_accumulation_steps": accumulation, "optim": "sgd", "save_strategy": "no"}
    settings |= {"dataloader_num_workers": workers}
    (found,) = world.run(1, trainer_job.train, "", Path("unused"), settings, None, job)
    return found


def assert_equal(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> None:
    for key, values in wanted.items():
        assert found[key] == pytest.approx(values, rel=TOLERANCE), key


@pytest.mark.parametrize(
    ("strategy", "accumulation"),
    [
        ("ddp", 1),
        ("ddp", 2),
        ("zero3", 2),
        ("tensor=2", 1),
        ("pipeline=2", 1),
        ("server=1", 1),
    ],
)
def test_a_job_of_the_trainer_has_the_losses_of_one_process(
    strategy: str, accumulation: int, tmp_path: Path
) -> None:
    settings = {"gradient_accumulation_steps": accumulation, "optim": "sgd"}
    first, second = world.run(2, trainer_job.train, strategy, tmp_path, settings)
    assert_equal(first, expected(accumulation))
    assert not second["loss"] or second == first  # rank 0 alone may log


@pytest.mark.parametrize(
    ("strategy", "accumulation"), [("ddp", 1), ("ddp", 2), ("zero3", 2), ("pipeline=2", 1)]
)
def test_a_classifier_that_takes_keywords_and_returns_a_mean_has_the_losses_of_one_process(
    strategy: str, accumulation: int, tmp_path: Path
) -> None:
    settings = {"gradient_accumulation_steps": accumulation, "optim": "sgd"}
    settings |= {"save_strategy": "no"}
    first, _ = world.run(2, trainer_job.train, strategy, tmp_path, settings, None, "bert")
    assert_equal(first, expected(accumulation, "bert"))


@pytest.mark.parametrize(
    ("strategy", "accumulation", "workers"),
    [("ddp", 1, 0), ("zero3", 2, 0), ("pipeline=2", 1, 0), ("ddp", 2, 2)],
)
def test_tokens_that_a_collate_function_masks_are_those_of_one_process(
    strategy: str, accumulation: int, workers: int, tmp_path: Path
) -> None:
    settings = {"gradient_accumulation_steps": accumulation, "optim": "sgd"}
    settings |= {"dataloader_num_workers": workers}
    first, _ = world.run(2, trainer_job.train, strategy, tmp_path, settings, None, "masked")
    assert_equal(first, expected(accumulation, "masked", workers))


def test_masks_after_resuming_are_those_of_a_trainer_on_one_process_that_resumes(
    tmp_path: Path,
) -> None:
    found = []
    for strategy, ranks in (("", 1), ("ddp", 2)):
        folder = tmp_path / f"{strategy or 'one'}"
        job = ranks, trainer_job.train, strategy
        world.run(*job, folder, {"optim": "sgd"}, None, "masked")
        again = str(folder / "checkpoint-2")
        found.append(world.run(*job, folder / "again", {"optim": "sgd"}, again, "masked")[0])
    wanted, resumed = found
    assert_equal(resumed, wanted)


def test_a_checkpoint_resumes_under_another_strategy_with_adamw_and_its_schedule(
    tmp_path: Path,
) -> None:
    whole, _ = world.run(2, trainer_job.train, "zero3", tmp_path, {})
    resumed, _ = world.run(
        2, trainer_job.train, "ddp", tmp_path / "again", {}, str(tmp_path / "checkpoint-4")
    )
    assert resumed["loss"][-2:] == pytest.approx(whole["loss"][-2:], rel=TOLERANCE)
    assert resumed["grad_norm"][-2:] == pytest.approx(whole["grad_norm"][-2:], rel=1e-4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    assert sum(p.numel() for p in model.parameters()) > 0


def refuses(setting: str, value: Any) -> str:
    try:
        trainer_job.train("ddp", Path("unused"), {setting: value})
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("setting", "value", "cure"),
    [
        ("bf16", True, 'shoal.init(precision="bf16")'),
        ("gradient_checkpointing", True, 'shoal.init("recompute,...")'),
        ("label_smoothing_factor", 0.1, "compute_loss_func"),
    ],
)
def test_what_the_run_decides_is_refused_with_the_line_that_says_it(
    setting: str, value: Any, cure: str
) -> None:
    for said in world.run(2, refuses, setting, value):
        assert cure in said


def test_a_checkpoint_without_the_generators_of_its_collate_function_is_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(CheckpointError, match=r"shoal-collate\.safetensors is missing.*Copy it"):
        trainer_job.ShoalTrainer._load_rng_state(SimpleNamespace(), str(tmp_path))
