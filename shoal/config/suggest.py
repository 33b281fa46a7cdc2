"""What someone who wrote an unknown name most likely meant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from difflib import get_close_matches

from shoal.config.fields import all_sections, all_settings

# What other programs call it.
FOREIGN_NAMES = {
    "arch": "model.name",
    "architecture": "model.name",
    "pretrained": "model.weights",
    "syncbn": "model.sync_batchnorm",
    "dataset": "data.name",
    "root": "data.path",
    "num_workers": "data.workers",
    "img_size": "data.image_size",
    "bs": "train.batch_size",
    "max_epoch": "train.epochs",
    "num_epochs": "train.epochs",
    "gradient_accumulation_steps": "train.accumulate",
    "max_grad_norm": "train.clip_norm",
    "amp": "train.precision",
    "smoothing": "train.label_smoothing",
    "learning_rate": "optimizer.lr",
    "base_lr": "optimizer.lr",
    "wd": "optimizer.weight_decay",
    "betas": "optimizer.options.betas",
    "eps": "optimizer.options.eps",
    "warmup_steps": "schedule.warmup_epochs",
    "min_lr": "schedule.final_factor",
    "scheduler": "schedule",
    "output_dir": "out",
    "random_seed": "seed",
    "width": "model.options.width",
    "dropout": "model.options.dropout",
}


def unknown(name: str) -> str:
    """`NAME is not known; did you mean 'X'?`, where X is found by its last word too, or what
    its section holds.
    """
    section, _, last = name.rpartition(".")
    spellings = _spellings()
    # A last word that fits is better evidence than a whole name that looks alike.
    close = get_close_matches(last, spellings, n=1, cutoff=0.8)
    if not close and section not in all_sections():
        close = get_close_matches(name, spellings, n=1, cutoff=0.6)
    if not close:
        return f"{name} is not known; {_contents(section)}"
    meant = spellings[close[0]]
    nearest = [other for other in meant if other.rpartition(".")[0] == section] or meant
    return f"{name} is not known; did you mean {_or_list(nearest)}?"


def _spellings() -> dict[str, list[str]]:
    """Dotted names, last words and other programs' words, each with the names that it may stand
    for.
    """
    spellings: dict[str, list[str]] = defaultdict(list)
    for name in (*all_settings(), *all_sections()):
        for spelling in {name, name.rpartition(".")[2]}:
            spellings[spelling].append(name)
    for word, name in FOREIGN_NAMES.items():
        spellings[word] = spellings.get(word, [name])
    return spellings


def _contents(section: str) -> str:
    if section in all_sections():
        return f"known in {section}: {_listed(name for name in all_settings() if name.startswith(f'{section}.'))}"
    return (
        f"known: {_listed(name for name in (*all_settings(), *all_sections()) if '.' not in name)}"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _or_list(names: list[str]) -> str:
    return " or ".join(f"'{name}'" for name in names[:3])
