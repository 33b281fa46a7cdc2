"""Data sets by name. A new one is one file with a `load(config, seed) -> Source`, and one line
in `SOURCES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.config.job import DataConfig
from shoal.data import dummy, images, stdlib
from shoal.data.source import Source
from shoal.errors import ConfigError, did_you_mean

Loader = Callable[[DataConfig, int], Source]


def _of_torchvision(config: DataConfig, seed: int) -> Source:
    # Imported here: they import torchvision, which takes seconds that other sources do not need.
    from shoal.data.torchvision_sources import load_cifar, load_imagefolder

    return (load_imagefolder if config.name == "imagefolder" else load_cifar)(config, seed)


SOURCES: dict[str, Loader] = {
    "digits": images.load_digits,
    "cifar10": _of_torchvision,
    "cifar100": _of_torchvision,
    "imagefolder": _of_torchvision,
    "stdlib": stdlib.load,
    "dummy": dummy.load,
}


def load(config: DataConfig, seed: int, extra: Mapping[str, Loader] | None = None) -> Source:
    """Return the data set named `config.name`.

    Args:
        seed: of the job. Only `dummy` reads it; other sources have the same samples in every run.
        extra: sources of the user, which are searched before `SOURCES`.

    Raises:
        ConfigError: no such name.
        DataError: its files are missing or damaged.
    """
    sources = {**SOURCES, **(extra or {})}
    if config.name not in sources:
        raise ConfigError(
            f"data.name: there is no data set '{config.name}'; {did_you_mean(config.name, sources)}"
        )
    return sources[config.name](config, seed)
