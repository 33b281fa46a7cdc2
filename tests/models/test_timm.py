"""Models of timm, the optional extra, by name."""

import pytest
import torch

from shoal.errors import ConfigError
from shoal.models import build


@pytest.mark.parametrize("name", ["timm:test_resnet", "test_vit"])
def test_a_model_of_timm_is_built_for_our_classes_and_channels(name: str) -> None:
    options = {"img_size": 64} if "vit" in name else {}
    model = build(name, num_classes=7, input_shape=(1, 64, 64), options=options)
    assert model(torch.zeros(2, 1, 64, 64)).shape == (2, 7)


def test_an_unknown_name_of_timm_is_guessed() -> None:
    with pytest.raises(ConfigError, match="resnet50"):
        build("timm:resnet5O", num_classes=7, input_shape=(3, 64, 64), options={})
