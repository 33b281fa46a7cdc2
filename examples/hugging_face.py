"""A Llama of transformers on the source text of Python's standard library, in a loop of your own.

    python examples/hugging_face.py                                   one process
    shoal launch -n 2 examples/hugging_face.py                        two; the same losses
    shoal launch -n 2 --strategy zero3 examples/hugging_face.py       the model in shards

The model is small and random, so that it needs no download. Your own:
`AutoModelForCausalLM.from_pretrained(name)`, and `peft.get_peft_model(model, LoraConfig(...))` for
adapters. `model(**batch).loss` is the mean over the tokens of this rank, and ranks have different
numbers of them: `shoal.counted` says of how many it is the mean."""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import shoal
from shoal.config.job import DataConfig
from shoal.data import load

run = shoal.init()
source = load(DataConfig(name="stdlib", sequence_length=64), seed=0)


def sample(index):
    """A text of 16 to 64 characters, padded as a tokenizer does."""
    tokens, _ = source.train[index]
    mask = torch.arange(len(tokens)) < 16 + index % 49
    return {
        "input_ids": tokens * mask,
        "attention_mask": mask.long(),
        "labels": torch.where(mask, tokens, -100),
    }


config = LlamaConfig(
    vocab_size=source.num_classes,
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=30)
loader = DataLoader([sample(index) for index in range(600)], batch_size=20, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)


@run.step
def compute_loss(**batch):
    tokens = (batch["labels"][:, 1:] != -100).sum()
    return shoal.counted(model(**batch).loss * tokens, tokens)


for step, batch in enumerate(loader, start=1):
    optimizer.zero_grad()
    loss = compute_loss(**batch)
    run.clip_gradients(1.0)
    optimizer.step()
    schedule.step()
    if step % 5 == 0:
        print(f"step {step}  loss {loss.item():.4f}")
run.save_pretrained("llama")
