from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal.config.job import Job
from shoal.errors import ConfigError
from shoal.models import MODELS, build, zoo
from shoal.train import job_precheck

IMAGE, TEXT = (3, 32, 32), (16,)


def problems(name, input_shape=IMAGE, options=None, extra=None):
    with pytest.raises(ConfigError) as refused:
        build(name, 10, input_shape, options or {}, extra)
    return list(refused.value.problems)


@pytest.mark.parametrize(
    ("name", "input_shape", "parameters"),
    [
        ("mlp", (1, 8, 8), 85_002),
        ("residual_cnn", (1, 8, 8), 308_074),
        ("cifar_resnet18", (3, 32, 32), 11_173_962),
        ("lstm", (16,), 4_212_746),
        ("gpt", (16,), 3_166_208),
    ],
)
def test_each_model_of_ours_has_the_size_that_is_stated(name, input_shape, parameters):
    model = build(name, 10, input_shape, {})
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_a_name_of_torchvision_builds_its_model():
    model = build("resnet18", 2, (3, 64, 64), {"zero_init_residual": True})
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 2)
    assert not model.layer1[0].bn2.weight.any()


def test_a_model_of_torchvision_with_auxiliary_heads_gives_one_output():
    model = build("googlenet", 2, (3, 64, 64), {})
    assert model.train()(torch.randn(2, 3, 64, 64)).shape == (2, 2)


def test_a_builder_of_the_users_own_comes_before_the_others():
    def mine(*, num_classes: int, input_shape: tuple[int, ...], scale: float = 1.0) -> nn.Module:
        return nn.Linear(input_shape[0], int(scale * num_classes))

    for name in ("mine", "gpt", "resnet18"):
        assert build(name, 10, TEXT, {"scale": 2}, extra={name: mine}).out_features == 20
    assert set(MODELS) == {"mlp", "residual_cnn", "cifar_resnet18", "botnet50", "lstm", "gpt"}


def test_a_builder_that_takes_anything_is_given_anything():
    build(
        "mine",
        10,
        TEXT,
        {"width": 3},
        extra={"mine": lambda num_classes, **rest: nn.Linear(rest["width"], 1)},
    )


def test_a_builder_that_does_not_take_what_it_is_given_is_named():
    assert problems("mine", extra={"mine": lambda classes: nn.Identity()}) == [
        "model.name: mine must take num_classes and input_shape by keyword; it takes classes",
    ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gtp", "did you mean 'gpt'?"),
        ("resnet-18", "did you mean 'resnet18'?"),
        (
            "xyz",
            "known: botnet50, cifar_resnet18, gpt, lstm, mlp, residual_cnn, timm:NAME, "
            "torchvision's (resnet18...)",
        ),
    ],
)
def test_an_unknown_name_is_refused_with_a_hint(name, hint):
    (problem,) = problems(name)
    assert problem.startswith(f"model.name: there is no model '{name}'; {hint}")


def test_no_model_of_a_library_is_unknown_before_the_library_is_imported():
    names = sorted({*zoo.torchvision_names(), *zoo.timm_names()})
    for name in [*names[::100], "resnet18"]:
        model = replace(Job().model, name=name)
        assert list(job_precheck.problems(replace(Job(), model=model))) == []
    (problem,) = job_precheck.problems(replace(Job(), model=replace(Job().model, name="resnet19")))
    assert problem.startswith("model.name: there is no model 'resnet19'; did you mean")


def test_timm_where_it_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(zoo, "find_spec", lambda name: None)
    assert problems("timm:vit_tiny_patch16_224") == [
        "model.name: vit_tiny_patch16_224 is timm's, which is not installed; pip install "
        "'shoal[timm]'"
    ]


def test_all_bad_options_are_named_at_once():
    assert problems("gpt", TEXT, {"widht": 8, "layers": 2.5, "tied": 1, "num_classes": 3}) == [
        "model.options.widht: gpt has no such option; did you mean 'width'?",
        "model.options.layers: must be a whole number, not 2.5",
        "model.options.tied: must be true or false, not 1",
        "model.options.num_classes: Shoal fills this in from the data; leave it out",
    ]
    assert problems("residual_cnn", IMAGE, {"widths": [32, "64"], "norm": "layer"}) == [
        "model.options.widths: must be a list of whole numbers, not [32, '64']",
        "model.options.norm: must be one of group, batch, not 'layer'",
    ]


def test_all_bad_values_are_named_at_once():
    assert problems("gpt", IMAGE, {"layers": 0, "width": 10, "heads": 3, "dropout": 1.0}) == [
        "model.name: gpt takes sequences (time,), but a sample is (3, 32, 32)",
        "model.options.layers: 0; must be 1 or more",
        "model.options.width: 10; must be a multiple of heads=3",
        "model.options.dropout: 1.0; must be in [0, 1)",
    ]
    assert problems("lstm", TEXT, {"layers": 0, "width": 0}) == [
        "model.options.width: 0; must be 1 or more",
        "model.options.layers: 0; must be 1 or more",
    ]
    assert problems("residual_cnn", (1, 8, 8), {"widths": [8, 12, 8, 8], "blocks": 0}) == [
        "model.options.widths: 4 stages take images from 16x16, not (1, 8, 8)",
        "model.options.blocks: 0; each stage needs 1 or more",
        "model.options.widths: [12] must be positive multiples of groups=8",
    ]
    assert problems("mlp", options={"hidden": [0]}) == [
        "model.options.hidden: [0] has a width below 1"
    ]


def test_options_of_torchvision_are_checked_too():
    assert problems("resnet18", (1, 8, 8), {"zero_init_residuals": True, "groups": "many"}) == [
        "model.name: resnet18 takes images (3, height, width), but a sample is (1, 8, 8)",
        "model.options.zero_init_residuals: resnet18 has no such option; did you mean "
        "'zero_init_residual'?",
        "model.options.groups: must be a whole number, not 'many'",
    ]
    (problem,) = problems("resnet18", options={"groups": 2})
    assert problem.startswith(
        "model.options: resnet18 does not take {'groups': 2}: BasicBlock only supports"
    )


def test_a_model_of_torchvision_that_ignores_what_it_does_not_know_is_still_checked():
    assert build("mobilenet_v3_small", 2, IMAGE, {"width_mult": 0.5})
    (problem,) = problems("mobilenet_v3_small", options={"width": 0.5})
    assert problem.endswith("mobilenet_v3_small has no such option; did you mean 'width_mult'?")
