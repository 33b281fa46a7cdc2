"""Pushes of gradients to the servers during the backward pass, partition by partition.

      backward     layer 3            layer 2            layer 1
                   w3  b3             w2  b2             w1  b1
                     └─ partition 2 ──> push               └─ partition 0 ──> push
                           └ partition 1 waits for w2 ──> push

A partition is pushed when it has the last of its gradients. A parameter may lie in several
partitions, and a partition may hold several parameters.

If a gradient has the memory layout of its partition, it is sent from the memory where autograd has
put it. Others are copied one after the other to a send buffer, and encoded if they are compressed.
A parameter's gradient is freed when its last partition has been pushed.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial

import torch
from torch import Tensor

from shoal.comm.compression.base import Compression
from shoal.parameter_server.worker.client import WorkerClient
from shoal.parameter_server.worker.flat_params import FlatParams
from shoal.platform.tensors import dense
from shoal.strategies.grad_checks import FiniteCheck, accumulated_twice_error


class GradientPusher:
    """Pushes one worker's gradients.

    Attributes:
        parts_of: parameter name -> numbers of its partitions.
        left_out: number of a partition -> its residual, which compression has left out so far.
    """

    def __init__(
        self,
        client: WorkerClient,
        flat: FlatParams,
        compression: Compression | None,
        finite_check: FiniteCheck,
    ) -> None:
        self.client = client
        self.finite_check = finite_check
        self.flat = flat
        self.compression = compression
        self.parts_of: dict[str, list[int]] = {name: [] for name in flat.parameters}
        for part in client.parts:
            for segment in part.segments:
                self.parts_of[segment.name].append(part.number)
        self.left_out: dict[int, Tensor] = {}
        self._encoded: dict[int, Tensor] = {}
        self._is_last_backward = False
        self._had_gradient: set[str] = set()

    def register_hooks(self) -> None:
        """Register a hook on every parameter, to push gradients from now on."""
        for name, parameter in self.flat.parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._on_grad_ready, name))

    def begin(self, is_last: bool) -> None:
        """Begin a backward pass. The last one of a step completes gradients, and pushes them."""
        self._is_last_backward = is_last
        self._num_missing = [len(part.segments) for part in self.client.parts]

    def finish(self, zeroed: Container[str]) -> None:
        """End the last backward pass: push partitions whose parameters have got no gradient.

        Args:
            zeroed: names of parameters whose gradient was set to zero and not to None before the
                passes: if they had one, they are stepped by zeros.
        """
        self._is_last_backward = False
        for number, missing in enumerate(self._num_missing):
            if missing:
                for segment in self.client.parts[number].segments:
                    parameter, name = self.flat.parameters[segment.name], segment.name
                    if parameter.grad is None and name in zeroed and name in self._had_gradient:
                        parameter.grad = torch.zeros_like(parameter)
                self._push(number)

    def residuals(self) -> dict[str, Tensor]:
        """Return the residual of each parameter, in its shape. Empty before the first step.

        They do not depend on the partitions, so another run may have other ones.
        """
        if not self.left_out:
            return {}
        by_partition = {
            number: [
                {"residual": residual[segment.offset : segment.offset + segment.length]}
                for segment in self.client.parts[number].segments
            ]
            for number, residual in self.left_out.items()
        }
        return {
            name: self.flat.gather(name, by_partition)["residual"] for name in self.flat.parameters
        }

    def load(self, residuals: Mapping[str, Tensor]) -> None:
        """Load what `residuals` returned, with these or other partitions. Empty: begin at zero."""
        self.left_out = {}
        if not residuals:
            return
        shares = self.flat.scatter(lambda name: {"residual": residuals[name]})
        for number, segments in enumerate(shares):
            self.left_out[number] = torch.cat([segment["residual"] for segment in segments])

    def _on_grad_ready(self, name: str, _: Tensor) -> None:
        if not self._is_last_backward:
            return
        for number in self.parts_of[name]:
            self._num_missing[number] -= 1
            if self._num_missing[number] < 0:
                raise accumulated_twice_error(name)
            if self._num_missing[number] == 0:
                self._push(number)

    def _push(self, number: int) -> None:
        """Push a partition with the gradients that it has, and free gradients that are sent."""
        segments = self.client.parts[number].segments
        gradients = [self.flat.parameters[segment.name].grad for segment in segments]
        self._look_at(number)
        present = bytes(gradient is not None for gradient in gradients)
        named = zip(segments, gradients, strict=True)
        self._had_gradient.update(segment.name for segment, given in named if given is not None)
        sparse = self.compression is None and any(g is not None and g.is_sparse for g in gradients)
        message = None
        if len(segments) == 1 and self.compression is None and gradients[0] is not None:
            message = self.flat.flat_gradient_or_none(segments[0], gradients[0])
        if message is None:
            self._copy_to_send_buffer(number)
            message = self._message(number)
        self._num_missing[number] = 0
        self.client.push(number, message, present, sparse)
        for segment in segments:
            parameter = self.flat.parameters[segment.name]
            if segment.start + segment.length == parameter.numel():
                parameter.grad = None

    def _look_at(self, number: int) -> None:
        """Look for gradients of this rank that are not finite, before they are pushed."""
        self.finite_check.has_looked = True
        # A parameter in several partitions is looked at with the first.
        gradients = {
            segment.name: self.flat.parameters[segment.name].grad
            for segment in self.client.parts[number].segments
            if segment.start == 0
        }
        self.finite_check.look(gradients)

    def _copy_to_send_buffer(self, number: int) -> None:
        """Copy gradients to the send buffer, zeros for missing ones.

        The first partition of a parameter copies all of its gradient.
        """
        for segment in self.client.parts[number].segments:
            if segment.start > 0:
                continue
            gradient = self.flat.parameters[segment.name].grad
            window = self.flat.gradient_windows[segment.name]
            if gradient is None:
                window.zero_()
            else:
                window.copy_(dense(gradient))

    def _message(self, number: int) -> Tensor:
        """Return what is sent for a partition whose gradients are in the send buffer.

        Returns: the values, or bytes, torch.uint8, if they are compressed.
        """
        gradient = self.flat.gradients[number]
        if self.compression is None:
            return gradient
        if number not in self._encoded:
            size_bytes = self.compression.size_bytes(gradient.numel(), gradient.dtype)
            self._encoded[number] = torch.empty(size_bytes, dtype=torch.uint8)
        if self.compression.keeps_error and number not in self.left_out:
            self.left_out[number] = torch.zeros_like(gradient)
        self.compression.encode(gradient, self.left_out.get(number), self._encoded[number])
        return self._encoded[number]
