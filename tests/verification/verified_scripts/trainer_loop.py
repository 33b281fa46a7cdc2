"""A loop of transformers' Trainer; "mean of means" averages means over each rank's own tokens."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Texts(Dataset):
    """Rows of tokens, of which a good part does not count."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, 32, (40, 6), generator=draws)
        ignored = torch.rand(40, 6, generator=draws) < 0.4
        self.labels = self.tokens.masked_fill(ignored, -100)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16,
)
arguments = TrainingArguments(
    "out",
    use_cpu=True,
    per_device_train_batch_size=4,
    max_steps=5,
    learning_rate=0.1,
    optim="sgd",
    average_tokens_across_devices=sys.argv[1] != "mean of means",
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    logging_strategy="no",
)
Trainer(LlamaForCausalLM(config), arguments, train_dataset=Texts()).train()
