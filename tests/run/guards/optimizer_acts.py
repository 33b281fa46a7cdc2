"""What a script does with optimizers, copies and random numbers, beside a plain script."""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn


class OptimizerActs:
    """Acts of a script; each does the same to the plain one. `Script` has the attributes."""

    run: Any
    model: nn.Module
    plain: nn.Module
    optimizer: torch.optim.Optimizer
    plain_optimizer: torch.optim.Optimizer
    backward: Any
    step: Any
    train: Any

    def _both(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer, self.plain_optimizer]

    def momentum_norms(self) -> None:
        found, expected = (
            sum(state["momentum_buffer"].norm() ** 2 for state in optimizer.state.values())
            for optimizer in self._both()
        )
        assert abs(float(found) / float(expected) - 1) < 1e-10

    def momentum_of_groups(self) -> None:
        for optimizer in self._both():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter]["momentum_buffer"].mul_(0.5)
        self.train()

    def states_counted(self) -> None:
        found, expected = (len(optimizer.state) for optimizer in self._both())
        assert found == expected

    def state_looked_for(self) -> None:
        for optimizer, model in zip(self._both(), (self.model, self.plain), strict=True):
            for parameter in model.parameters():
                assert "momentum_buffer" in optimizer.state.get(parameter, {})

    def state_cleared(self) -> None:
        for optimizer in self._both():
            optimizer.state.clear()
        self.train()
        self.train()

    def state_replaced(self) -> None:
        for optimizer in self._both():
            optimizer.state = defaultdict(dict)
        self.train()
        self.train()

    def optimizer_copied(self) -> None:
        copied = copy.deepcopy(self.optimizer)
        assert len(copied.state) == len(self.plain_optimizer.state)

    def weights_of_groups(self) -> None:
        found, expected = (
            sum(p.detach().square().sum() for g in optimizer.param_groups for p in g["params"])
            for optimizer in self._both()
        )
        assert abs(float(found) / float(expected) - 1) < 1e-10

    def numbers_of_groups(self) -> None:
        found, expected = (
            sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            for optimizer in self._both()
        )
        assert found == expected

    def clipped_by_groups(self) -> None:
        self.backward()
        for optimizer in self._both():
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            norm = sum(p.grad.square().sum() for p in parameters) ** 0.5
            for parameter in parameters:
                parameter.grad = parameter.grad * (0.01 / norm)
        self.step()

    def scaled_by_hand(self) -> None:
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in self._both()]
        self.backward(lambda loss, plain: scalers[plain].scale(loss))
        torch.set_default_dtype(torch.float64)  # as a script may
        for scaler, optimizer in zip(scalers, self._both(), strict=True):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        torch.set_default_dtype(torch.float32)

    def kept_weights_loaded(self) -> None:
        kept = self.run.weights()
        was = {name: value.clone() for name, value in kept.items()}
        expected = copy.deepcopy(self.plain.state_dict())
        self.train()
        assert all(torch.equal(kept[name], was[name]) for name in was)
        with self.run.edit():
            self.model.load_state_dict(kept)
        self.plain.load_state_dict(expected)
        assert all(torch.equal(value, was[name]) for name, value in self.run.weights().items())
        self.train()

    def kept_state_loaded(self) -> None:
        kept = self.run.state()
        expected = copy.deepcopy((self.plain.state_dict(), self.plain_optimizer.state_dict()))
        self.train()
        self.run.load_state(*kept)
        self.plain.load_state_dict(expected[0])
        self.plain_optimizer.load_state_dict(expected[1])

    def kept_gradients(self) -> None:
        self.backward()
        kept = self.run.gradients()
        was: dict[str, Tensor] = {name: value.clone() for name, value in kept.items()}
        self.step()
        self.optimizer.zero_grad(set_to_none=False)
        assert all(torch.equal(kept[name], was[name]) for name in was)

    def weights_listed(self) -> None:
        found, expected = (sum(model[0].bias.tolist()) for model in (self.model, self.plain))
        assert abs(found - expected) < 1e-10

    def norms_bounded(self) -> None:
        for model in (self.model, self.plain):
            with self.run.edit(), torch.no_grad():
                model[0].weight.data = torch.renorm(model[0].weight.data, 2, dim=0, maxnorm=0.1)
        self.train()

    def whole_norms_bounded(self) -> None:
        weights = self.run.weights()
        for changed in (weights, expected := self.plain.state_dict()):
            changed["0.weight"] = torch.renorm(changed["0.weight"], 2, dim=0, maxnorm=0.1)
        with self.run.edit():
            self.model.load_state_dict(weights)
        self.plain.load_state_dict(expected)
        self.train()

    def noise_on_weights(self) -> None:
        for model in (self.model, self.plain):
            torch.manual_seed(3)
            with self.run.edit(), torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)
        self.train()

    def layers_begun_anew(self) -> None:
        for model in (self.model, self.plain):
            torch.manual_seed(4)
            with self.run.edit():
                nn.init.normal_(model[0].weight, 0, 0.1)
                nn.init.xavier_uniform_(model[2].weight)
                nn.init.kaiming_uniform_(model[4].weight)
        self.train()


OPTIMIZER_READS = (
    *("momentum_norms", "states_counted", "state_looked_for", "optimizer_copied"),
    *("weights_of_groups", "numbers_of_groups", "weights_listed"),
)
"""Acts that only look: one rank alone may be refused."""
OPTIMIZER_WRITES = (
    *("momentum_of_groups", "state_cleared", "state_replaced", "clipped_by_groups"),
    *("scaled_by_hand", "kept_weights_loaded", "kept_gradients", "kept_state_loaded"),
    *("noise_on_weights", "layers_begun_anew", "norms_bounded", "whole_norms_bounded"),
)
