"""A tiny GPT-2 of transformers: resumes, and writes what `from_pretrained` reads.

python gpt2.py DIRECTORY, or shoal launch -n 2 --strategy zero3 gpt2.py DIRECTORY
"""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

import shoal

directory = sys.argv[1]
run = shoal.init()
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
model = GPT2LMHeadModel(config).to(run.device)
tokens = torch.randint(64, (24, 12), generator=torch.Generator().manual_seed(0))
rows = [{"input_ids": row} for row in tokens]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = get_linear_schedule_with_warmup(optimizer, 2, 12)
model, optimizer, loader = run.prepare(model, optimizer, DataLoader(rows, batch_size=8))
checkpoint = run.checkpoint(f"{directory}/checkpoints", schedule=schedule)


def compute_loss(input_ids):
    """Mean over all tokens: all rows have one length."""
    return model(input_ids=input_ids, labels=input_ids).loss


step = checkpoint.resume()
for epoch in range(loader.epoch, 3):
    for batch in loader:
        optimizer.zero_grad()
        loss = run.forward_backward(compute_loss, **batch)
        run.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        step += 1
    run.print(f"epoch {epoch + 1}  loss {loss.item():.6f}")
    checkpoint.save(step)
run.save_pretrained(f"{directory}/gpt2")
run.save(f"{directory}/weights.pt")
