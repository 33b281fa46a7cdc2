"""The forward pass of a model as a graph, so that it can be cut between any two steps: torch.fx, with three additions.

[1] *Units stay whole.* Blocks of a container (`strategies/units.py`) are one node each. They are called as modules, so
    what hooks into them goes on working; they are looked into only where that leaves too few places to cut.
[2] *What cannot be traced stays whole too.* A module whose own Python code looks at values is one node.
[3] *Training and evaluation are traced apart*, for `self.training` is a constant to a tracer.

A tracer follows one path through the code. On a sample, the graph is run and compared with the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from shoal.errors import StrategyRefused

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Traced:
    """A model's forward pass.

    Attributes:
        training, evaluating: graphs of the same nodes; constants may differ.
        num_inputs: positional ones; others have their default values.
    """

    training: fx.Graph
    evaluating: fx.Graph
    num_inputs: int


def traced(model: nn.Module, num_inputs: int, whole: Set[str], sample: Inputs | None = None) -> Traced:
    """The graphs of `model`, which is left as it was.

    Args:
        whole: names of modules that are not looked into.
        sample: inputs that the graph is tried on.

    Raises: StrategyRefused: the model's own forward function cannot be traced, or does other things than the graph.
    """
    with _mode(model, True):
        training = _graph(model, num_inputs, set(whole))
    with _mode(model, False):
        evaluating = _graph(model, num_inputs, set(whole))
        if sample is not None:
            _compare(model, evaluating, sample)
    if [_shape(node) for node in training.nodes] != [_shape(node) for node in evaluating.nodes]:
        raise StrategyRefused(
            "pipeline: the model's forward function takes another way in training than in evaluation, so its stages "
            "are not the same. Move what differs into a module of its own inside a Sequential or ModuleList."
        )
    return Traced(training, evaluating, num_inputs)


def _graph(model: nn.Module, num_inputs: int, whole: set[str]) -> fx.Graph:
    while True:
        tracer = _Tracer(num_inputs, whole)
        before = [buffer._version for buffer in model.buffers()]
        try:
            graph = tracer.trace(model)
            if before != [buffer._version for buffer in model.buffers()]:
                raise StrategyRefused(
                    f"pipeline: {type(model).__name__}.forward writes into buffers of its own, which cannot be traced. "
                    "Move what it does with them into a module of its own."
                )
            return graph
        except StrategyRefused:
            raise
        except Exception as error:  # whatever the model's code raises on a stand-in for a tensor
            if not tracer.failed_in:
                raise StrategyRefused(
                    f"pipeline: {type(model).__name__}.forward cannot be traced, so there is no place to cut it: "
                    f"{_first_line(error)}. Keep what depends on values inside modules that the forward function calls."
                ) from error
            whole.add(tracer.failed_in)


class _Tracer(fx.Tracer):
    def __init__(self, num_inputs: int, whole: Set[str]) -> None:
        super().__init__()
        self.num_inputs, self.whole, self.failed_in = num_inputs, whole, ""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if type(m) in _REWRITTEN:
            return module_qualified_name in self.whole
        # What has buffers may write into them, which a tracer would do once and for all.
        keeps = any(True for _ in m.buffers(recurse=False))
        return keeps or module_qualified_name in self.whole or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name = self.path_of_module(m)
        if type(m) in _REWRITTEN and not self.is_leaf_module(m, name):
            rewritten = _REWRITTEN[type(m)]
            forward = lambda *a, **k: rewritten(m, *a, **k)  # noqa: E731
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_in = self.failed_in or name
            raise

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """As many inputs as there will be; a stand-in for an optional one would look as if it were given."""
        inputs = [self.create_proxy("placeholder", f"input_{index}", (), {}) for index in range(self.num_inputs)]
        return _REWRITTEN.get(type(self.root), root_fn), [self.root, *inputs]


def _encoder(
    self: nn.TransformerEncoder, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None
) -> Any:
    """nn.TransformerEncoder without its fast path for inference, whose code looks at values.

    A mask says all; `is_causal` is only a hint that it is the causal one.
    """
    output = src
    for layer in self.layers:
        output = layer(output, src_mask=mask, is_causal=False, src_key_padding_mask=src_key_padding_mask)
    return output if self.norm is None else self.norm(output)


def _decoder(
    self: nn.TransformerDecoder,
    tgt: Any,
    memory: Any,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    tgt_is_causal: Any = None,
    memory_is_causal: bool = False,
) -> Any:
    """nn.TransformerDecoder in the same way."""
    output = tgt
    for layer in self.layers:
        output = layer(
            output,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=False,
            memory_is_causal=False,
        )
    return output if self.norm is None else self.norm(output)


_REWRITTEN: dict[type[nn.Module], Callable[..., Any]] = {
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoder: _decoder,
}


def _compare(model: nn.Module, graph: fx.Graph, sample: Inputs) -> None:
    """Raise StrategyRefused where the graph gives something else than the model on a sample, in evaluation mode."""
    with torch.no_grad(), torch.random.fork_rng():
        expected = tree_leaves(model.forward(*sample))
        given = tree_leaves(fx.Interpreter(model, graph=graph).run(*sample))
    alike = len(expected) == len(given) and all(_close(*pair) for pair in zip(expected, given, strict=True))
    if not alike:
        raise StrategyRefused(
            f"pipeline: traced, {type(model).__name__} gives another output than it does itself: its code asks what "
            "kind of input it has, and a tracer's stand-in is another. Move that into a module of its own."
        )


def _close(expected: Any, given: Any) -> bool:
    if not isinstance(expected, Tensor) or not isinstance(given, Tensor):
        return type(expected) is type(given) and bool(expected == given)
    if expected.shape != given.shape or not expected.is_floating_point():
        return expected.shape == given.shape and bool((expected == given).all())
    # Inference may take kernels of its own; another path through the code is another number altogether.
    size = expected.abs().max() if expected.numel() else torch.zeros(())
    return bool(((expected - given).abs() <= 1e-3 * size + 1e-6).all())


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return node.op, str(node.target), [value.name for value in node.all_input_nodes]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
