"""Tensors that a script keeps from one call of `compute_loss` to the next, such as hidden states.

      self.hidden = rnn(x, self.hidden)[1].detach()       in a model, a criterion, a closure

In a step of micro-batches these are the samples of another micro-batch, so it is refused: a tensor
that a call reads and then replaces. One that is made once, such as a table, or is read only after
it was made, may stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.platform.torch_private.subclasses import DisableTorchFunctionSubclass
from shoal.run.places import Place


class ReadTensor(Tensor):
    """A tensor that notes if it is used."""

    is_read = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with DisableTorchFunctionSubclass():
            for value in (*args, *(kwargs or {}).values()):
                for tensor in value if isinstance(value, (tuple, list)) else (value,):
                    if isinstance(tensor, ReadTensor):
                        tensor.is_read = True
            return func(*args, **(kwargs or {}))


class KeptTensors:
    """Watches tensors over the first two calls of a step.

    Args: places: of tensors, and of tuples and lists of tensors.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._before = [(place, value) for place in places if _is_kept(value := place.read())]
        self._places = places
        self._changed: list[tuple[Place, Any]] | None = None
        self._watched: list[tuple[Place, Any, list[ReadTensor]]] = []

    def begin_call(self) -> None:
        """Watch what the call before has changed."""
        if self._changed is None:
            return
        for place, value in self._changed:
            watched = [tensor.as_subclass(ReadTensor) for tensor in _tensors(value)]
            place.write(watched[0] if isinstance(value, Tensor) else type(value)(watched))
            self._watched.append((place, value, watched))

    def end_call(self) -> None:
        """Raise UsageError for a tensor that the call has read and replaced."""
        if self._changed is None:
            known = {(id(place.holder), place.key): value for place, value in self._before}
            found = [(p, p.read(), known.get((id(p.holder), p.key))) for p in self._places]
            self._changed = [(p, now) for p, now, old in found if now is not old and _is_kept(now)]
            return
        replaced = []
        for place, value, watched in self._watched:
            if _is_same(place.read(), watched):
                place.write(value)
            elif any(tensor.is_read for tensor in watched):
                replaced.append(place)
        self._watched = []
        if replaced:
            raise UsageError(
                f"compute_loss keeps {replaced[0].name} from one call to the next, and here a step "
                "calls it once for each micro-batch: it would meet that of other samples. Keep it "
                "in the loop, give it as an argument of run.forward_backward and return it beside "
                "the loss, `return loss, hidden`; or use accumulate=1."
            )


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _is_kept(value: Any) -> bool:
    """Return whether a value is a tensor, or a tuple or list of them, of a dimension or more."""
    if type(value) is Tensor:
        return value.dim() > 0
    return type(value) in (tuple, list) and bool(value) and all(type(t) is Tensor for t in value)


def _is_same(value: Any, watched: list[ReadTensor]) -> bool:
    if isinstance(value, nn.Parameter) or not isinstance(value, (Tensor, tuple, list)):
        return False
    now = _tensors(value)
    return len(now) == len(watched) and all(a is b for a, b in zip(now, watched, strict=True))
