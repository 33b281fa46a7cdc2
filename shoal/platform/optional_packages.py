"""Packages that only some work needs, each with the extra of Shoal that brings it.

`pip install shoal` brings what every run imports. What else a command needs is checked before it
begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

EXTRAS = {
    "torchvision": ("train", "torchvision"),
    "PIL": ("train", "pillow"),
    "matplotlib": ("plots", "matplotlib"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "timm": ("timm", "timm"),
    "transformers": ("hf", "transformers"),
    "lightning": ("lightning", "lightning"),
    "wandb": ("loggers", "wandb"),
    "mlflow": ("loggers", "mlflow"),
    "trackio": ("loggers", "trackio"),
    "torchao": ("lean", "torchao"),
}
"""By the name of the import: the extra, and the name of the package."""


def is_installed(name: str) -> bool:
    """Return True if a package can be found. It is not imported."""
    try:
        return find_spec(name) is not None
    except ValueError:  # in sys.modules without a spec
        return False


def missing(*names: str) -> list[str]:
    """Return a sentence with the cure for each of these packages that is not installed."""
    absent = [EXTRAS[name] for name in names if not is_installed(name)]
    return [
        f"{package} is not installed: pip install 'shoal[{extra}]'"
        for extra, package in dict.fromkeys(absent)
    ]


def missing_for(what: str, names: Iterable[str]) -> list[str]:
    """Return `WHAT: X is not installed: pip install ...` for each package that is not there."""
    return [f"{what}: {sentence}" for sentence in missing(*names)]
