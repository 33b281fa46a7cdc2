"""Forward functions that a tracer can follow, for two containers of torch.

nn.TransformerEncoder and nn.TransformerDecoder read values in their own forward functions, to
choose a fast path for inference. These replacements call the same layers and leave out that choice.
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
    """Run an nn.TransformerEncoder.

    `is_causal` is ignored: it is only a hint that `mask` is causal, and the mask itself is enough.
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
    """Run an nn.TransformerDecoder; its hints are ignored too."""
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


TRACEABLE_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoder: _decoder,
}
