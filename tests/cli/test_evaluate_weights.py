"""`shoal eval --cfg FILE MODEL.WEIGHTS FILE`, as distribuuuu's own evaluation is called."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from shoal import cli, models


def images(root: Path) -> Path:
    """Make two classes of two images, to train on and to validate with."""
    for split in ("train", "val"):
        for number, label in enumerate(("cat", "dog")):
            directory = root / split / label
            directory.mkdir(parents=True)
            for index in range(2):
                color = (40 * number, 90 * index, 200)
                Image.new("RGB", (64, 64), color).save(directory / f"{index}.png")
    return root


def test_a_checkpoint_of_distribuuuu_is_evaluated_and_code_in_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "resnet18.yaml").write_text("MODEL: {ARCH: resnet18}\nTEST: {BATCH_SIZE: 4}\n")
    state = models.build("resnet18", 2, (3, 224, 224), {}).state_dict()
    file = tmp_path / "ckpt_ep_001.pth.tar"
    # Its cosine schedule computes with NumPy, and so the saved learning rate is one of NumPy's.
    groups = [{"lr": np.float64(0.05), "params": [0]}]
    held = {"epoch": 1, "best_acc1": 0.0, "optimizer": {"state": {}, "param_groups": groups}}
    words = ["eval", "--json", "--cfg", str(tmp_path / "resnet18.yaml")]
    words += ["TRAIN.DATASET", str(images(tmp_path / "data")), "TRAIN.WORKERS", "0"]
    words += ["TRAIN.TOPK", "2"]
    found = []
    for prefix in ("", "module."):
        weights = {prefix + name: value for name, value in state.items()}
        torch.save({**held, "state_dict": weights}, file)
        with pytest.raises(SystemExit) as stop:
            cli.main([*words, "MODEL.WEIGHTS", str(file)])
        assert stop.value.code == 0
        found.append(json.loads(capsys.readouterr().out)["result"])
    assert found[0] == found[1]
    assert found[0]["samples"] == 4
    torch.save({**held, "state_dict": state, "config": Path("x")}, file)
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "MODEL.WEIGHTS", str(file)])
    assert stop.value.code == 2
    assert "tensors alone are read" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert "no weights are named" in capsys.readouterr().out
