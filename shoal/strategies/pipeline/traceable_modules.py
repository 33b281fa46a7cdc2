"""torch's own containers as a tracer can follow them: without their fast paths for inference,
which look at values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def _encoder(
    self: nn.TransformerEncoder,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: Any = None,
) -> Any:
    """nn.TransformerEncoder without its fast path for inference, whose code looks at values.

    A mask says all; `is_causal` is only a hint that it is the causal one.
    """
    output = src
    for layer in self.layers:
        output = layer(
            output, src_mask=mask, is_causal=False, src_key_padding_mask=src_key_padding_mask
        )
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


REWRITTEN: dict[type[nn.Module], Callable[..., Any]] = {
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoder: _decoder,
}
