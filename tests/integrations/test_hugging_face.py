"""Models of transformers and adapters of peft: under each strategy the losses of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoal
from shoal.testing import world
from shoal.weights.deferred_init import EmptyTensor

transformers = pytest.importorskip("transformers", reason="pip install shoal[hf]")
peft = pytest.importorskip("peft", reason="pip install shoal[hf]")

VOCABULARY, LENGTH, IGNORED = 64, 12, -100
SIZES = {
    **{"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48},
    **{"num_attention_heads": 4},
}
TEXT = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
STEPS = 6
TOLERANCE = 2e-6
"""transformers computes its norms and losses in float32, whatever the dtype of the model is."""


def gpt2() -> nn.Module:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **rates, **ends)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def qwen3() -> nn.Module:
    config = transformers.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8)
    return transformers.Qwen3ForCausalLM(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, **NO_DROPOUT))


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        **SIZES, **NO_DROPOUT, image_size=16, patch_size=4, num_labels=5
    )
    return transformers.ViTForImageClassification(config)


def llama_with_lora() -> nn.Module:
    adapter = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False
    )
    return peft.get_peft_model(llama(), adapter)


MODELS: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each for each in (gpt2, llama, qwen3, bert, vit, llama_with_lora)
}


def samples(name: str) -> list[dict[str, Tensor]]:
    """Return 24 samples: images with a class, or texts of 5 to 11 tokens, padded."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(24):
        if name == "vit":
            pixels = torch.randn(3, 16, 16, generator=generator)
            found.append({"pixel_values": pixels, "labels": torch.tensor(index % 5)})
            continue
        tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        mask = torch.arange(LENGTH) < 5 + index % 7
        labels = torch.where(mask, tokens, IGNORED)
        found.append({"input_ids": tokens * mask, "attention_mask": mask.long(), "labels": labels})
    return found


def counted_loss(model: nn.Module, name: str, batch: dict[str, Tensor]) -> Any:
    """Return the model's own loss, with the number of tokens that it is the mean of."""
    loss = model(**batch).loss
    if name == "vit":
        return loss
    is_shifted = name != "bert"
    tokens = (batch["labels"][:, int(is_shifted) :] != IGNORED).sum()
    return shoal.counted(loss * tokens, tokens)


def train(run: shoal.Run, name: str, saved: Path | None = None) -> list[float]:
    """Train a model in the loop of Hugging Face's examples; return its losses."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 2, STEPS)
    data = DataLoader(samples(name), batch_size=8, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader = run.prepare(model, optimizer, data)
    losses = []
    for _ in range(STEPS // 3):
        for batch in loader:
            optimizer.zero_grad()
            loss = run.forward_backward(lambda **b: counted_loss(model, name, b), **batch)
            run.clip_gradients(1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    if saved is not None:
        weights = run.weights()
        if run.rank == 0:
            model.save_pretrained(saved, state_dict=weights)
    return losses


def losses_of(strategy: str, names: list[str], folder: Path | None = None) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for name in names:
        run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
        found[name] = train(run, name, None if folder is None else folder / name)
    return found


@cache
def on_one_process() -> dict[str, list[float]]:
    (found,) = world.run(1, losses_of, "single", [*MODELS])
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tensor=2", "pipeline=2"])
def test_models_of_transformers_train_with_the_losses_of_one_process(strategy: str) -> None:
    for found in world.run(2, losses_of, strategy, [*MODELS]):
        for name, expected in on_one_process().items():
            assert found[name] == pytest.approx(expected, rel=TOLERANCE), name


def test_what_was_trained_in_shards_is_loaded_by_from_pretrained(tmp_path: Path) -> None:
    world.run(2, losses_of, "zero3", ["gpt2", "llama_with_lora"], tmp_path)
    world.run(1, losses_of, "single", ["gpt2"], tmp_path / "one")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "gpt2")
    for name, weight in expected.state_dict().items():
        assert torch.allclose(model.state_dict()[name], weight, atol=TOLERANCE), name
    prompt = torch.tensor([[1, 2, 3]])
    said = [each.generate(prompt, max_new_tokens=8, do_sample=False) for each in (model, expected)]
    assert said[0].tolist() == said[1].tolist()
    assert said[0].shape == (1, 11)
    assert {file.name for file in (tmp_path / "llama_with_lora").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def load_into_empty(strategy: str, folder: Path, names: list[str]) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name in names:
        run = shoal.init(strategy, announce=lambda _: None)
        with shoal.empty_weights():
            model = MODELS[name]()
        assert all(isinstance(each, EmptyTensor) for each in model.parameters() if each.dim() > 1)
        shoal.load_weights(model, folder / name)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found[name] = run.weights()
    return found


@pytest.mark.parametrize("strategy", ["zero3", "tensor=2"])
def test_a_model_without_memory_gets_what_from_pretrained_reads(
    tmp_path: Path, strategy: str
) -> None:
    names = ["gpt2", "llama", "qwen3", "bert"]
    saved = {name: MODELS[name]() for name in names}
    for name, model in saved.items():
        model.save_pretrained(tmp_path / name, max_shard_size="30KB")
    for found in world.run(2, load_into_empty, strategy, tmp_path, names):
        for name, model in saved.items():
            for key, value in model.state_dict().items():
                assert torch.equal(found[name][key], value), (name, key)
