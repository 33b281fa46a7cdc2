"""Curves from real run directories; the pictures themselves are looked at by people."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shoal.config import Job, to_yaml
from shoal.config.job import TrainConfig
from shoal.errors import ConfigError
from shoal.plotting.curves import COLORS, plot, read_runs


def make_run(
    directory: Path, epochs: int = 3, steps: int = 8, measure: str = "top1", evaluate: bool = True
) -> Path:
    directory.mkdir(parents=True)
    records = []
    for step in range(1, epochs * steps + 1):
        values = {
            "loss": 3 / step,
            measure: 100 - 90 / step,
            "lr": 0.1,
            "samples_per_s": 800 + step,
        }
        records.append(
            {"kind": "train", "step": step, "epoch": (step - 1) // steps + 1, "sample": 0, **values}
        )
        if step % steps == 0 and evaluate:
            result = {"loss": 4 / step, measure: 99 - 90 / step}
            records.append({"kind": "validation", "step": step, "epoch": step // steps, **result})
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    return directory


def svg_text(path: Path) -> str:
    """Every text in a picture; matplotlib keeps them as comments beside the drawn letters."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    tree = ElementTree.parse(path, parser)
    return "\n".join(
        (node.text or "").strip() for node in tree.iter() if node.tag is ElementTree.Comment
    )


@pytest.mark.slow
def test_a_run_becomes_a_picture_as_wide_as_a_page(tmp_path):
    run = make_run(tmp_path / "digits")
    plot([run], run / "curves.png")
    with Image.open(run / "curves.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape[1] == 1500
    assert (pixels == 255).all(axis=2).mean() > 0.8  # a light background
    for color in COLORS[:2]:
        wanted = [int(color[start : start + 2], 16) for start in (1, 3, 5)]
        assert (
            np.abs(pixels.astype(int) - wanted).max(axis=2) < 8
        ).sum() > 100  # both curves were drawn
    assert sorted(entry.name for entry in run.iterdir()) == ["curves.png", "metrics.jsonl"]


@pytest.mark.slow
def test_panels_show_what_there_is_and_nothing_else_and_always_the_same(tmp_path):
    plot([make_run(tmp_path / "digits")], tmp_path / "digits.svg")
    plot([tmp_path / "digits"], tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "digits.svg").read_bytes()
    plot([make_run(tmp_path / "gpt", measure="perplexity")], tmp_path / "gpt.svg")
    digits, gpt = svg_text(tmp_path / "digits.svg"), svg_text(tmp_path / "gpt.svg")
    assert "Top-1 accuracy (%)" in digits
    assert "Perplexity" not in digits
    assert "Perplexity" in gpt
    assert "Top-1 accuracy (%)" not in gpt


def test_several_runs_are_told_apart_by_name_also_where_there_are_more_than_colours(tmp_path):
    runs = [tmp_path / f"{ranks}-ranks" for ranks in range(len(COLORS) + 1)]
    plot([make_run(run, epochs=1, steps=1) for run in runs], tmp_path / "new" / "all.svg")
    assert {*map(str, runs), "training", "validation"} <= set(
        svg_text(tmp_path / "new" / "all.svg").splitlines()
    )


def test_the_legend_says_where_training_is_drawn_as_a_running_mean(tmp_path):
    plot([make_run(tmp_path / "short", epochs=3, steps=8)], tmp_path / "short.svg")
    plot([make_run(tmp_path / "long", epochs=10, steps=8)], tmp_path / "long.svg")
    smoothed = "training (running mean; pale: as measured)"
    assert "training" in svg_text(tmp_path / "short.svg").splitlines()
    assert smoothed not in svg_text(tmp_path / "short.svg").splitlines()
    assert smoothed in svg_text(tmp_path / "long.svg").splitlines()


def test_the_losses_say_that_training_has_smoothed_labels_and_validation_has_not(tmp_path):
    plain, smoothed = make_run(tmp_path / "plain"), make_run(tmp_path / "smoothed")
    train = TrainConfig(label_smoothing=0.1, mixup=0.2)
    (smoothed / "config.yaml").write_text(to_yaml(Job(train=train)))
    (plain / "config.yaml").write_text(to_yaml(Job()))
    plot([plain], tmp_path / "plain.svg")
    plot([smoothed], tmp_path / "smoothed.svg")
    plot([plain, smoothed], tmp_path / "both.svg")
    assert "label smoothing" not in svg_text(tmp_path / "plain.svg")
    assert "training with label smoothing 0.1, mixup 0.2" in svg_text(tmp_path / "smoothed.svg")
    assert "training: the runs have different targets" in svg_text(tmp_path / "both.svg")


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path):
    runs = [make_run(tmp_path / parent / "digits") for parent in ("monday", "tuesday")]
    assert [run.name for run in read_runs(runs)] == list(map(str, runs))


def test_runs_of_different_batch_sizes_share_an_axis_of_epochs(tmp_path):
    small, large = read_runs(
        [make_run(tmp_path / "small", steps=8), make_run(tmp_path / "large", steps=2)]
    )
    assert small.epochs_at(np.array([0.0, 4, 8, 24])).tolist() == [0, 0.5, 1, 3]
    assert large.epochs_at(np.array([0.0, 1, 2, 6, 7])).tolist() == [0, 0.5, 1, 3, 3.5]


def test_before_the_first_evaluation_the_axis_is_steps(tmp_path):
    plot([make_run(tmp_path / "young", evaluate=False)], tmp_path / "young.svg")
    words = svg_text(tmp_path / "young.svg").splitlines()
    assert "step" in words
    assert "epoch" not in words


def test_torn_lines_and_numbers_that_are_not_finite_are_left_out_and_counted(tmp_path, capfd):
    run = make_run(tmp_path / "digits")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 25, "loss": null}\n{"kind": "train", "st')
    plot([run], tmp_path / "x.png")
    assert "1 unreadable line" in capfd.readouterr().err
    assert read_runs([run])[0].curves["train", "loss"].steps[-1] == 24


def test_every_directory_that_is_no_run_is_named_with_what_to_give_instead(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        plot(
            [tmp_path / "absent", tmp_path / "empty", make_run(tmp_path / "digits")],
            tmp_path / "x.png",
        )
    assert len(caught.value.problems) == 2
    for name, problem in zip(("absent", "empty"), caught.value.problems, strict=True):
        assert f"{name}: no run directory, it holds no metrics.jsonl" in problem
    assert not (tmp_path / "x.png").exists()


def test_a_run_without_records_says_so(tmp_path):
    run = make_run(tmp_path / "digits", epochs=0)
    with pytest.raises(ConfigError, match="no records yet; wait for the first logged step"):
        plot([run], tmp_path / "x.png")


@pytest.mark.parametrize("name", ["x.gif", "x"])
def test_an_unknown_suffix_is_answered_with_the_known_ones(tmp_path, name):
    with pytest.raises(ConfigError, match=r"unknown suffix .*known: \.png \.svg \.pdf"):
        plot([make_run(tmp_path / "digits")], tmp_path / name)
