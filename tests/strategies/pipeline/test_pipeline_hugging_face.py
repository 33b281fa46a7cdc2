"""Models of Hugging Face in a pipeline: they compute their own loss, and are called by keyword."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shoal.run import init_with_place
from shoal.testing import world

pytest.importorskip("transformers")

GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.randint(3, 50, (8, 10), generator=GENERATOR)
MASK = torch.ones(8, 10, dtype=torch.int64)
MASK[::2, 7:] = 0
LABELS = TOKENS.masked_fill(MASK == 0, -100)
NAMES = ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration"]


def made(name: str) -> nn.Module:
    """A tiny model of this class, without dropout."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, dict[str, Any]] = {
        "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 3, "n_head": 2, "attn_pdrop": 0.0},
        "LlamaForCausalLM": {"num_key_value_heads": 1},
        "BertForMaskedLM": {
            "max_position_embeddings": 16,
            "attention_probs_dropout_prob": 0.0,
        },
        "T5ForConditionalGeneration": {
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "dropout_rate": 0.0,
        },
    }
    shared = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    given = sizes[name] if name.startswith(("GPT2", "T5")) else shared | sizes[name]
    if name.startswith("T5"):
        given |= {"num_heads": 2, "decoder_start_token_id": 0}
    model_class = getattr(transformers, name)
    model: nn.Module = model_class(model_class.config_class(vocab_size=50, **given)).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def trained(strategy: str) -> dict[str, Tensor]:
    """Return losses and gradients of each model."""
    found: dict[str, Tensor] = {}
    for name in NAMES:
        run = init_with_place(strategy, precision="fp64", announce=lambda _: None)
        model = made(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(TOKENS, MASK, LABELS), batch_size=8)
        model, optimizer, loader = run.prepare(model, optimizer, loader)

        shift = 0 if name.startswith(("Bert", "T5")) else 1

        def compute_loss(
            tokens: Tensor,
            mask: Tensor,
            labels: Tensor,
            model: nn.Module = model,
            shift: int = shift,
        ) -> Any:
            # The count of a micro-batch: a mean over its tokens would weigh its samples otherwise.
            out = model(input_ids=tokens, attention_mask=mask, labels=labels)
            logits = out.logits.double()
            losses = nn.functional.cross_entropy(
                logits[:, : logits.shape[1] - shift].transpose(1, 2),
                labels[:, shift:],
                reduction="none",
            )
            return losses.sum(1).mean() / 10 + 0.0 * out.loss

        for batch in loader:
            found[f"{name} loss"] = run.forward_backward(compute_loss, *batch)
            found |= {f"{name} {key}": v for key, v in run.gradients().items() if v is not None}
    return found


@pytest.mark.slow
def test_models_that_compute_their_own_loss_train_as_in_one_process() -> None:
    [expected] = world.run(1, trained, "single")
    for strategy in ("pipeline=2,microbatches=2", "pipeline=2,schedule=zero-bubble,stages=1"):
        for found in world.run(2, trained, strategy):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10, msg=name)
