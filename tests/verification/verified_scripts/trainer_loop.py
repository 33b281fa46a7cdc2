"""The Trainer of transformers; "mean of means" lets each rank divide by its own tokens."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=2, n_head=2)
model = GPT2LMHeadModel(config)
tokens = torch.randint(0, 16, (32, 8))
labels = tokens.clone()
labels[torch.rand(32, 8) < 0.4] = -100
data = [{"input_ids": t, "labels": n} for t, n in zip(tokens, labels, strict=True)]
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=4,
    max_steps=5,
    optim="sgd",
    learning_rate=0.1,
    lr_scheduler_type="constant",
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    average_tokens_across_devices=sys.argv[1] != "mean of means",
)
Trainer(model=model, args=arguments, train_dataset=data).train()
