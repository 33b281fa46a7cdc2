"""The one place that makes torchvision importable; everyone writes `from
shoal.platform.torchvision_import import torchvision`.

torchvision's wheel carries compiled operators. A wheel that was built for another torch (one with
CUDA, next to a CPU-only torch 2.13) cannot load them, which torchvision means to survive. But its
import describes two of them, `nms` and `qnms`, to torch's shape inference, loaded or not, and dies
with `operator torchvision::nms does not exist`. With their schemas defined first, the import goes
through; models, datasets and transforms need nothing compiled, and images
decode through Pillow. Calling the two operators still fails, which is right: there is no kernel.
"""

from __future__ import annotations

import contextlib
import warnings
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType

import torch

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def load() -> ModuleType:
    """torchvision, imported; the same module however often this is called.

    Where the compiled operators load, this is a plain import. timm, which imports torchvision
    itself, works afterwards.

    Raises: ImportError: torchvision is not installed. RuntimeError: it was built for another CUDA
    version than torch."""
    if not _operators_load():
        for name in ("nms", "qnms"):
            # Whoever came before us may have defined them; a second definition would be an error.
            if not hasattr(torch.ops.torchvision, name):
                # torch.library.define keeps the definition alive until the process ends, as a
                # Library object of our own would not: torch takes its operators back when it is
                # collected.
                torch.library.define(f"torchvision::{name}", SCHEMA)
    with warnings.catch_warnings():
        # The missing decoders are no news to anyone: images decode through Pillow.
        warnings.filterwarnings("ignore", message="Failed to load", category=UserWarning)
        # The second generation of transforms is not brought by torchvision itself.
        import_module("torchvision.transforms.v2")
        return import_module("torchvision")


def _operators_load() -> bool:
    """Load the library that torchvision is about to load (a second time is free), and say
    whether that worked.
    """
    package = find_spec("torchvision")
    if package is None:
        raise ImportError(
            "torchvision is not installed. Install it with `pip install torchvision`."
        )
    extension = PathFinder.find_spec("_C", package.submodule_search_locations)
    if extension is None or extension.origin is None:
        return False
    with contextlib.suppress(OSError):
        torch.ops.load_library(extension.origin)
        return True
    return False


torchvision = load()
