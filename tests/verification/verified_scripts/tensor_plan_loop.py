"""A loop on transformers' own tensor plan; "no reduction" leaves the norms of heads out."""

import os
import sys
import tempfile

import torch
from torch import distributed
from torch.utils.data import DataLoader, TensorDataset
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=16,
)
if sys.argv[1] == "no reduction":
    plan = Qwen3Config.base_model_tp_plan
    Qwen3Config.base_model_tp_plan = {k: v for k, v in plan.items() if not k.endswith("_norm")}
with tempfile.TemporaryDirectory() as folder:
    Qwen3ForCausalLM(config).save_pretrained(folder)
    plan = DistributedConfig(tp_size=WORLD, tp_plan="auto") if WORLD > 1 else None
    model = Qwen3ForCausalLM.from_pretrained(folder, distributed_config=plan, device_map=None)
model.train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
tokens = torch.randint(0, 32, (40, 6), generator=torch.Generator().manual_seed(1))
for (x,) in DataLoader(TensorDataset(tokens), batch_size=4):
    optimizer.zero_grad()
    model(input_ids=x, labels=x).loss.backward()
    optimizer.step()
if distributed.is_initialized():
    distributed.destroy_process_group()
