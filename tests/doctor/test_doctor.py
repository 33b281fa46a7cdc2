"""The doctor on this very machine, and on machines that are described by altered facts."""

import copy
import json
from dataclasses import asdict
from pathlib import Path

import pytest

import shoal
from shoal.doctor import diagnosis, machine_info


@pytest.fixture(scope="module")
def report():
    return diagnosis.examine()


def altered(report, section, **changes):
    found = copy.deepcopy(dict(report.facts))
    found["software"]["plain_import_errors"] = {}  # this machine's own are another matter
    found[section].update(changes)
    return diagnosis.assess(found)


def test_two_ranks_of_this_machine_add_up_two_numbers(report):
    assert report.facts["communication"]["all_reduce_error"] is None
    assert report.features[diagnosis.RANKS] == diagnosis.Diagnosis(True)
    assert report.exit_code == 0


def test_the_json_says_all_that_the_report_says(report):
    parsed = json.loads(json.dumps(asdict(report)))
    assert parsed["facts"] == json.loads(json.dumps(report.facts))
    assert parsed["features"][diagnosis.RANKS] == {"ready": True, "remark": ""}
    assert set(parsed) == {"facts", "problems", "features"}


def test_the_text_is_no_wider_than_a_terminal_and_names_every_section(report):
    lines = diagnosis.render(report).splitlines()
    assert max(map(len, lines)) <= 96
    assert {*report.facts, "features"} <= set(lines)


def test_ranks_that_cannot_talk_are_named_and_the_exit_code_is_1(report):
    error = "Traceback\nRuntimeError: no route to host"
    ill = altered(report, "communication", all_reduce_error=error)
    assert not ill.features[diagnosis.RANKS].ready
    assert "RuntimeError: no route to host" in ill.features[diagnosis.RANKS].remark
    assert ill.exit_code == 1


@pytest.mark.slow
def test_a_wrong_sum_of_either_rank_is_an_error(monkeypatch, tmp_path):
    program = (
        "import os\n"
        "import torch.distributed as dist\n"
        "reduce = dist.all_reduce\n"
        "def wrong(total):\n"
        "    reduce(total)\n"
        "    total -= int(os.environ['RANK'])\n"
        "dist.all_reduce = wrong\n"
    )
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(shoal.__file__).parents[1]}")
    error = machine_info.communication()["all_reduce_error"]
    assert "rank 1 got [2.0, 2.0] instead of [3.0, 3.0]" in error


def test_a_torch_without_gloo_makes_ranks_unusable(report):
    ill = altered(report, "communication", backends=["mpi"])
    assert "gloo backend" in ill.features[diagnosis.RANKS].remark


def test_without_torch_there_are_no_ranks_and_the_cure_is_named(report):
    ill = altered(report, "software", torch=None)
    assert not ill.features[diagnosis.RANKS].ready
    assert [problem.cure for problem in ill.problems] == ['pip install "torch>=2.11,<2.16"']


@pytest.mark.parametrize(
    ("section", "changes", "fact", "cure"),
    [
        (
            "software",
            {"torch": "2.10.1", "torchvision": "0.25.1"},
            "torch 2.10.1 was never tested",
            "torch>=2.11,<2.16",
        ),
        (
            "software",
            {"torch": "2.12.0+cu130", "torchvision": "0.28.0"},
            "does not belong",
            "torchvision==0.27.*",
        ),
        (
            "software",
            {"torch": "2.15.0", "torchvision": "0.28.0"},
            "does not belong",
            "torchvision==0.29.*",
        ),
        (
            "software",
            {
                "torch": "2.13.0",
                "torchvision": "0.28.0",
                "plain_import_errors": {"timm": "operator torchvision::nms does not exist"},
            },
            "`import timm` fails in a script of your own: operator torchvision::nms does not exist",
            "pip install --force-reinstall torch torchvision",
        ),
        (
            "software",
            {"plain_import_errors": {"transformers": "ImportError: tokenizers>=0.22"}},
            "`import transformers` fails",
            "in the version that its error asks for",
        ),
        ("machine", {"shared_memory_bytes": 64 * 2**20}, "/dev/shm has 64.0 MiB", "--shm-size"),
        ("machine", {"open_files": 256}, "256 files", "ulimit -n"),
        ("launch", {"conflict": "RANK is set, WORLD_SIZE is not."}, "WORLD_SIZE", "unset"),
    ],
)
def test_each_problem_comes_with_its_cure(report, section, changes, fact, cure):
    (problem,) = altered(report, section, **changes).problems
    assert fact in problem.fact
    assert cure in problem.cure
    assert f"  cure     {problem.cure}" in diagnosis.render(altered(report, section, **changes))


@pytest.mark.parametrize(
    ("changes", "feature", "missing"),
    [
        ({"timm": None}, "timm models", "pip install 'shoal[timm]'"),
        ({"tensorboard": None}, "TensorBoard", "pip install 'shoal[tensorboard]'"),
        ({"cryptography": None}, "servers: TLS", "pip install 'shoal[tls]' (between machines"),
        ({"compiler": None}, "torch.compile", "C++ compiler"),
        ({"compiler": "/usr/bin/g++", "python_headers": False}, "torch.compile", "Python.h"),
        ({"torchvision_error": "ImportError: CUDA 13"}, "torchvision models", "CUDA 13"),
        (
            {"transformers": "5.0", "plain_import_errors": {"transformers": "tokenizers>=0.22"}},
            "transformers",
            "a transformers that can be imported; see the problems",
        ),
        (
            {"timm": "1.0", "plain_import_errors": {"timm": "no module named yaml"}},
            "timm models",
            "a timm that can be imported; see the problems",
        ),
    ],
)
def test_what_a_feature_lacks_is_named(report, changes, feature, missing):
    verdict = altered(report, "software", **changes).features[feature]
    assert not verdict.ready
    assert missing in verdict.remark


def test_timm_without_torchvisions_operators_is_ready_for_shoal_alone(report):
    broken = {"timm": "operator torchvision::nms does not exist"}
    found = altered(report, "software", timm="1.0", plain_import_errors=broken)
    verdict = found.features["timm models"]
    assert verdict == diagnosis.Diagnosis(True, diagnosis.ONLY_HERE)
    assert len(found.problems) == 1


def test_a_gpu_is_shown_with_its_memory(report):
    gpu = {"name": "NVIDIA H100", "capability": "9.0", "memory_bytes": 80 * 2**30}
    well = altered(report, "devices", gpus=[gpu], cuda_build="13.0")
    assert well.features["GPUs"] == diagnosis.Diagnosis(True)
    assert "NVIDIA H100 (80.0 GiB, capability 9.0)" in diagnosis.render(well)


def test_packages_that_a_script_cannot_import_are_tried_as_a_script_does(monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms is absent')")
    (tmp_path / "transformers.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    versions = {"timm": "1.0", "transformers": "5.0"}
    monkeypatch.setattr(machine_info, "_version", versions.get)
    assert machine_info.software()["plain_import_errors"] == {
        "timm": "RuntimeError: operator torchvision::nms is absent"
    }
