"""torchvision can be imported, whatever torch it was built for."""

import subprocess
import sys

import pytest
import torch

from shoal.platform.torchvision_import import load, torchvision


def test_models_and_transforms_work():
    model = torchvision.models.resnet18(num_classes=10).eval()
    image = torchvision.transforms.v2.functional.horizontal_flip(torch.zeros(1, 3, 32, 32))
    assert model(image).shape == (1, 10)


def test_loading_twice_gives_the_same_module():
    assert load() is torchvision
    assert sys.modules["torchvision"] is torchvision


@pytest.mark.slow
def test_an_import_that_failed_before_and_a_schema_that_someone_else_defined_do_no_harm():
    # Where the operators load, the import succeeds and there is nothing to define, which is as
    # well.
    program = """
import torch
try:
    import torchvision
except RuntimeError:
    torch.library.define(
        "torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )
import shoal.platform.torchvision_import, gc
gc.collect()
import torchvision.ops
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
