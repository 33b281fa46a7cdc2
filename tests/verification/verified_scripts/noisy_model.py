"""A loop that calls `run.backward`; its first word says where it draws random numbers: in the
"model", for the "loss", or by functional "dropout"."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.decoder = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        code = self.encoder(x)
        if sys.argv[1] == "model":
            code = code + torch.randn_like(code)
        if sys.argv[1] == "dropout":
            code = F.dropout(code, 0.3, self.training)
        return self.decoder(code)


torch.manual_seed(0)
run = shoal.init()
model = Autoencoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(16, 6)), batch_size=8, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for (x,) in loader:
    optimizer.zero_grad()
    target = model(x)
    if sys.argv[1] == "loss":
        target = target + 0.1 * torch.randn_like(target)
    run.backward(F.mse_loss(target, x))
    optimizer.step()
