"""Import torchvision, also next to a torch that it was not built for. All other modules write `from
shoal.platform.torchvision_import import torchvision`.

torchvision's wheel contains compiled operators. A wheel that was built for another torch (for CUDA,
next to a CPU-only torch 2.13) cannot load them, and torchvision tries to go on without them. But
its import registers the shapes of two operators, `nms` and `qnms`, even if they are not loaded, and
fails with `operator torchvision::nms does not exist`. If their schemas are defined first, the
import succeeds. Models, datasets and transforms need no compiled operators, and Pillow decodes the
images.
A call of the two operators still fails, as it should: there is no kernel.
"""

from __future__ import annotations

import contextlib
import warnings
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType

import torch

LIBRARIES = ("_C_stable", "_C")
"""Names of the compiled library, since torchvision 0.29 and before."""
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def load() -> ModuleType:
    """Import torchvision and return it. A second call returns the same module.

    Where the compiled operators load, this is a plain import. timm imports torchvision itself, and
    works after this call.

    Raises: ImportError: torchvision is not installed. RuntimeError: it was built for another CUDA
    version than torch."""
    if not _operators_load():
        for name in ("nms", "qnms"):
            # Another module may have defined them already; a second definition would be an error.
            if not hasattr(torch.ops.torchvision, name):
                # torch.library.define keeps the definition until the process ends. With a Library
                # object, torch would remove the operators when the object is collected.
                torch.library.define(f"torchvision::{name}", SCHEMA)
    with warnings.catch_warnings():
        # Ignore missing decoders: Pillow decodes the images.
        warnings.filterwarnings("ignore", message="Failed to load", category=UserWarning)
        # `import torchvision` alone does not import the transforms v2.
        import_module("torchvision.transforms.v2")
        return import_module("torchvision")


def _operators_load() -> bool:
    """Load the compiled library of torchvision, and return True if that succeeded. torchvision
    loads it once more, at no cost."""
    package = find_spec("torchvision")
    if package is None:
        raise ImportError(
            "torchvision is not installed. Install it with `pip install torchvision`."
        )
    for name in LIBRARIES:
        extension = PathFinder.find_spec(name, package.submodule_search_locations)
        if extension is None or extension.origin is None:
            continue
        with contextlib.suppress(OSError):
            torch.ops.load_library(extension.origin)
            return True
    return False


torchvision = load()
