"""The tensor-parallel plan of transformers; "other batches" gives each rank samples of its own."""

import sys
import tempfile

import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

distributed.init_process_group("gloo")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
folders = [tempfile.mkdtemp()]
distributed.broadcast_object_list(folders)
if distributed.get_rank() == 0:
    LlamaForCausalLM(config).save_pretrained(folders[0])
distributed.barrier()
model = LlamaForCausalLM.from_pretrained(folders[0], tp_plan="auto")
model.train()
data = TensorDataset(torch.randint(0, 16, (32, 8), generator=torch.Generator().manual_seed(0)))
sampler = DistributedSampler(data) if sys.argv[1] == "other batches" else None
loader = DataLoader(data, batch_size=4, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (tokens,) in loader:
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
