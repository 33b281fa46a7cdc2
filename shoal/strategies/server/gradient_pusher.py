"""Gradients leave for the servers during the backward pass: each part as soon as the last of its
gradients is there.

      backward     layer 3       layer 2       layer 1
                   w3  b3        w2  b2        w1  b1          a parameter may lie in several parts, a part may hold
                     └─ part 2 ──> push          └─ part 0 ──> push    several parameters
                           └ part 1 waits for w2 ──> push

A gradient that already lies as its part does is sent from where autograd has left it; others are
laid end to end, and encoded where they go in fewer bytes. A parameter's gradient is dropped when
its last part was pushed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from shoal.comm.compression import Compression
from shoal.parameter_server.worker.client import WorkerClient
from shoal.parameter_server.worker.flat_params import FlatParams
from shoal.platform.tensors import dense
from shoal.strategies.grad_checks import accumulated_twice_error


class GradientPusher:
    """One worker's.

    Attributes:
        parts_of: the numbers of the parts that each parameter lies in.
        left_out: what compression has left out so far, of each part.
    """

    def __init__(
        self, client: WorkerClient, flat: FlatParams, compression: Compression | None
    ) -> None:
        self.client, self.flat, self.compression = client, flat, compression
        self.parts_of: dict[str, list[int]] = {name: [] for name in flat.parameters}
        for part in client.parts:
            for segment in part.segments:
                self.parts_of[segment.name].append(part.number)
        self.left_out: dict[int, Tensor] = {}
        self._messages: dict[int, Tensor] = {}
        self._open = False

    def register_hooks(self) -> None:
        """Hear of every gradient from now on."""
        for name, parameter in self.flat.parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._has_gradient, name))

    def begin(self, last: bool) -> None:
        """A backward pass comes; the last one of a step completes its gradients, and pushes
        them.
        """
        self._open = last
        self._missing = [len(part.segments) for part in self.client.parts]

    def finish(self) -> None:
        """The last backward pass is over. Push what is left: parts with parameters that have
        got no gradient.
        """
        self._open = False
        for number, missing in enumerate(self._missing):
            if missing:
                self._push(number)

    def residuals(self) -> dict[str, Tensor]:
        """What compression has left out so far of each parameter, however it is cut; nothing
        before the first step.
        """
        kept = {
            number: [
                {"numbers": left[s.offset : s.offset + s.length]}
                for s in self.client.parts[number].segments
            ]
            for number, left in self.left_out.items()
        }
        return {
            name: self.flat.gather(name, kept)["numbers"] for name in self.flat.parameters if kept
        }

    def load(self, left_out: Mapping[str, Tensor]) -> None:
        """The inverse; it may have been cut otherwise."""
        shares = self.flat.scatter(lambda name: {"numbers": left_out[name]}) if left_out else []
        self.left_out = {
            number: torch.cat([s["numbers"] for s in segments])
            for number, segments in enumerate(shares)
        }

    def _has_gradient(self, name: str, _: Tensor) -> None:
        if not self._open:
            return
        for number in self.parts_of[name]:
            self._missing[number] -= 1
            if self._missing[number] < 0:
                raise accumulated_twice_error(name)
            if self._missing[number] == 0:
                self._push(number)

    def _push(self, number: int) -> None:
        """Send a part, with what gradients it has; a parameter's are dropped with its last part."""
        segments = self.client.parts[number].segments
        gradients = [self.flat.parameters[segment.name].grad for segment in segments]
        present = bytes(gradient is not None for gradient in gradients)
        sparse = self.compression is None and any(g is not None and g.is_sparse for g in gradients)
        whole = gradients[0] if len(segments) == 1 and self.compression is None else None
        message = None if whole is None else self.flat.flat_gradient_or_none(segments[0], whole)
        if message is None:
            self._copy_to_send_buffer(number)
            message = self._message(number)
        self._missing[number] = 0
        self.client.push(number, message, present, sparse)
        for segment in segments:
            parameter = self.flat.parameters[segment.name]
            if segment.start + segment.length == parameter.numel():
                parameter.grad = None

    def _copy_to_send_buffer(self, number: int) -> None:
        """Lay a part's gradients end to end; a parameter's are laid with its first part."""
        for segment in self.client.parts[number].segments:
            gradient, window = (
                self.flat.parameters[segment.name].grad,
                self.flat.gradient_windows[segment.name],
            )
            if segment.start == 0:
                window.zero_() if gradient is None else window.copy_(dense(gradient))

    def _message(self, number: int) -> Tensor:
        """What goes over the wire for a part's gradient, as it is laid."""
        gradient = self.flat.gradients[number]
        if self.compression is None:
            return gradient
        if number not in self._messages:
            size_bytes = self.compression.size_bytes(gradient.numel(), gradient.dtype)
            self._messages[number] = torch.empty(size_bytes, dtype=torch.uint8)
        if self.compression.keeps_error and number not in self.left_out:
            self.left_out[number] = torch.zeros_like(gradient)
        self.compression.encode(gradient, self.left_out.get(number), self._messages[number])
        return self._messages[number]
