"""Suggestions for an unknown name."""

from __future__ import annotations

from collections import defaultdict
from difflib import get_close_matches

from shoal.config.fields import all_sections, all_settings

# The words of other programs for our settings.
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

REMOVED = {
    "checkpoint.copies": "all hosts must share the run directory",
    "checkpoint.second_place": "a last save waits for room; see checkpoint.last_save_wait_s",
    "optimizer.in_backward": "it lowered no peak: strategy zero2 shards gradients, recompute frees "
    "activations, and optimizer.name AdamW8bit has smaller moments",
    **dict.fromkeys(
        ("train.mixup", "train.cutmix"), "a data set of an --import FILE can mix its samples"
    ),
    "train.warm_start": "train on less data first, and go on from it by --weights",
    "snapshot": "set checkpoint.fast_dir, such as /dev/shm, and checkpoint.fast_every_steps",
}
"""Settings and sections that earlier versions had, and what to do instead."""


def unknown(name: str) -> str:
    """Return `NAME is not known; did you mean 'X'?`, or the names in its section.

    Of a setting that was removed it says what to do instead.

    X may also be a setting that resembles only the last word of the name.
    """
    for removed, cure in REMOVED.items():
        if name == removed or name.startswith(f"{removed}."):
            return f"{name} was removed; {cure}"
    section, _, last = name.rpartition(".")
    spellings = _spellings()
    # A last word that fits is better evidence than a whole name that looks alike.
    close = get_close_matches(last, spellings, n=1, cutoff=0.8)
    if not close and section not in all_sections():
        close = get_close_matches(name, spellings, n=1, cutoff=0.6)
    if not close:
        return f"{name} is not known; {_contents(section)}"
    candidates = spellings[close[0]]
    # Of several settings with this last word, one in the same section is the likeliest.
    nearest = [other for other in candidates if other.rpartition(".")[0] == section] or candidates
    return f"{name} is not known; did you mean {_or_list(nearest)}?"


def _spellings() -> dict[str, list[str]]:
    """Return the names that a text may mean: a dotted name, a last word, a foreign word."""
    spellings: dict[str, list[str]] = defaultdict(list)
    for name in (*all_settings(), *all_sections()):
        for spelling in {name, name.rpartition(".")[2]}:
            spellings[spelling].append(name)
    for word, name in FOREIGN_NAMES.items():
        spellings[word] = spellings.get(word, [name])
    return spellings


def _contents(section: str) -> str:
    if section in all_sections():
        names = [name for name in all_settings() if name.startswith(f"{section}.")]
        return f"known in {section}: {', '.join(names)}"
    names = [name for name in (*all_settings(), *all_sections()) if "." not in name]
    return f"known: {', '.join(names)}"


def _or_list(names: list[str]) -> str:
    return " or ".join(f"'{name}'" for name in names[:3])
