"""Models of transformers itself under strategies; needs `pip install shoal[hf]`."""

import pytest

from tests.scripts.runner import LAYOUTS, Layout
from tests.scripts.script import pretrained
from tests.scripts.test_scripts import check

pytest.importorskip("transformers")


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_models_of_transformers_on_two_ranks(strategy):
    check(list(pretrained()), Layout(strategy, 2))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_models_of_transformers(layout):
    check(list(pretrained()), layout)
