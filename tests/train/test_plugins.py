"""The page on configuration shows a model and a data set of one's own; they train as they stand
there.
"""

from pathlib import Path

import torch
import yaml
from tiny_jobs import metrics, trains

from shoal.config import read

PAGE = Path(__file__).parents[2] / "docs/configuration.md"


def test_the_model_and_the_data_set_that_the_page_shows_train(tmp_path: Path) -> None:
    code = PAGE.read_text().partition("```python\n# mine.py\n")[2].partition("```")[0]
    (tmp_path / "mine.py").write_text(code)
    settings = {
        "plugins": [str(tmp_path / "mine.py")],
        "model": {"name": "net", "options": {"width": 64}},
        "data": {"name": "signs"},
        "train": {"epochs": 2, "batch_size": 50},
        "log": {"tensorboard": False},
        "out": str(tmp_path / "run"),
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    assert trains(read(str(tmp_path / "mine.yaml"), []).job) == 16
    assert torch.isfinite(torch.tensor(metrics(tmp_path / "run")[-1]["loss"]))
