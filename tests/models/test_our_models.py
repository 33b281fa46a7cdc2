import pytest
import torch
from torch.nn import functional as F

from shoal.models import build

# name, options, input_shape
SMALL = [
    ("mlp", {"hidden": [16, 12]}, (1, 8, 8)),
    ("mlp", {"hidden": [], "activation": "relu"}, (5,)),
    ("residual_cnn", {"widths": [8, 16, 24]}, (1, 8, 8)),
    ("residual_cnn", {"widths": [6, 10], "blocks": 2, "norm": "batch"}, (3, 9, 12)),
    ("lstm", {"width": 8, "layers": 2}, (6,)),
    ("lstm", {"width": 8, "layers": 1, "tied": True}, (6,)),
    ("gpt", {"width": 8, "heads": 2, "layers": 2}, (6,)),
    ("gpt", {"width": 8, "heads": 2, "layers": 1, "tied": False, "dropout": 0.1}, (6,)),
]
each_model = pytest.mark.parametrize(("name", "options", "input_shape"), SMALL)
LANGUAGE = [case for case in SMALL if case[0] in ("lstm", "gpt")]
each_language_model = pytest.mark.parametrize(("name", "options", "input_shape"), LANGUAGE)


def seeded(name, options, input_shape, seed=0):
    torch.manual_seed(seed)
    return build(name, 7, input_shape, options)


def batch_for(name, input_shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    if name in ("lstm", "gpt"):
        return torch.randint(7, (4, *input_shape), generator=generator)
    return torch.randn(4, *input_shape, generator=generator, dtype=dtype)


@each_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_have_the_shape_and_dtype_that_the_loss_expects(name, options, input_shape, dtype):
    logits = seeded(name, options, input_shape).to(dtype)(batch_for(name, input_shape, dtype))
    assert logits.shape == ((4, *input_shape, 7) if name in ("lstm", "gpt") else (4, 7))
    assert logits.dtype == dtype


@each_model
def test_a_gradient_reaches_every_parameter(name, options, input_shape):
    model = seeded(name, options, input_shape).double()
    for parameter in model.parameters():
        # Branches that start as zero pass no gradient on before the first step.
        torch.nn.init.normal_(parameter, std=0.3)
    logits = model(batch_for(name, input_shape, torch.float64)).flatten(0, -2)
    F.cross_entropy(logits, torch.arange(len(logits)) % 7).backward()
    assert [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@each_model
def test_the_seed_alone_decides_the_weights(name, options, input_shape):
    one, same, other = (seeded(name, options, input_shape, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


@each_language_model
def test_a_later_token_never_changes_an_earlier_logit(name, options, input_shape):
    model = seeded(name, options, input_shape).double().eval()
    tokens = batch_for(name, input_shape)
    before = model(tokens)
    for time in range(1, input_shape[0]):
        changed = tokens.clone()
        changed[:, time] = (changed[:, time] + 1) % 7
        after = model(changed)
        torch.testing.assert_close(after[:, :time], before[:, :time], rtol=0, atol=1e-13)
        assert not torch.allclose(after[:, time:], before[:, time:])


@each_language_model
def test_an_untrained_language_model_is_unsure(name, options, input_shape):
    logits = seeded(name, options, input_shape)(batch_for(name, input_shape))
    assert F.cross_entropy(logits.flatten(0, 1), torch.arange(24) % 7).item() == pytest.approx(
        1.95, abs=0.35
    )


@pytest.mark.parametrize(("name", "embedding"), [("gpt", "token_embedding"), ("lstm", "embedding")])
def test_a_tied_head_is_the_embedding_itself(name, embedding):
    tied, untied = (
        seeded(name, {"width": 8, "layers": 1, "tied": tied}, (6,)) for tied in (True, False)
    )
    assert tied.head.weight is getattr(tied, embedding).weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


def test_with_group_norm_a_sample_does_not_see_its_neighbours():
    images = batch_for("residual_cnn", (1, 8, 8), torch.float64)
    for norm, alike in (("group", True), ("batch", False)):
        model = (
            seeded("residual_cnn", {"widths": [8, 16], "norm": norm}, (1, 8, 8)).double().train()
        )
        halves = torch.cat([model(images[:2]), model(images[2:])])
        assert torch.allclose(model(images), halves, rtol=1e-12) == alike


def test_a_gpt_takes_shorter_sequences_than_its_longest():
    model = seeded("gpt", {"width": 8, "heads": 2, "layers": 1}, (6,)).eval()
    tokens = batch_for("gpt", (6,))
    torch.testing.assert_close(model(tokens[:, :3]), model(tokens)[:, :3])
