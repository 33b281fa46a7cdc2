"""A language model of transformers as a workload: from its `config.json`, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.config.job import Job
from shoal.errors import UsageError
from shoal.planner.job_workload import in_precision
from shoal.planner.strategy_search import Workload
from shoal.planner.trace_model import trace_model
from shoal.platform.optional_packages import is_installed, missing
from shoal.platform.torch_private.fake_tensors import fake_tensors
from shoal.train import optimizer as job_optimizer

SEQUENCE = 2048
"""Tokens of a sample, where nothing else is said."""
LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
"""Ends of the names of classes that take tokens and return their loss."""


def config_workload(place: str, job: Job, length: int) -> Workload:
    """Count the work of a language model of transformers. Its weights are neither read nor made.

    Args:
        place: a directory with a config.json, or the file itself.
        job: its batch, precision and optimizer are used.
        length: tokens of a sample; 0 for 2,048, or fewer if the model has fewer positions.

    Raises: UsageError: transformers is not installed; the file is no config of a language model,
        or the model cannot run without values.
    """
    path = Path(place) / "config.json" if Path(place).is_dir() else Path(place)
    name = _architecture(path)
    if sentences := missing("transformers"):
        raise UsageError(f"hf:{place}: {sentences[0]}")
    if is_installed(
        "torchvision"
    ):  # transformers imports it, and it may be built for another torch
        from shoal.platform.torchvision_import import load

        load()
    import transformers

    kind = getattr(transformers, name, None)
    if kind is None:
        raise UsageError(f"{path}: transformers {transformers.__version__} has no class {name}.")
    config = kind.config_class.from_pretrained(path.parent, local_files_only=True)
    config.use_cache = False
    most = getattr(config, "max_position_embeddings", None) or length or SEQUENCE
    length = length or min(SEQUENCE, most)
    if length > most:
        raise UsageError(f"--seq {length}: the model has {most} positions. Give at most {most}.")
    with fake_tensors():
        model = kind(config)

    def compute_loss(tokens: Tensor) -> Any:
        return model(input_ids=tokens, labels=tokens).loss

    size = job.train.batch_size
    sample = (torch.zeros(1, length, dtype=torch.long),)
    work = trace_model(
        model,
        in_precision(compute_loss, job.train.precision),
        lambda module: job_optimizer.build(job.optimizer, module, size),
        sample,
        name,
    )
    return Workload(work, model, size, job.train.accumulate, COMMAND_NOTE)


COMMAND_NOTE = "To train it, write train.py as in docs/hugging-face.md, and run:"


def _architecture(path: Path) -> str:
    """Return the class that a config.json names. Raise UsageError if it is none of a language."""
    try:
        read = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(
            f"hf:{path}: {error.strerror}. Give a directory with config.json, such as "
            "AutoConfig.from_pretrained(NAME).save_pretrained(DIRECTORY) writes."
        ) from error
    except ValueError as error:
        raise UsageError(f"hf:{path}: is no JSON: {error}") from error
    names = read.get("architectures") if isinstance(read, dict) else None
    if not isinstance(names, list) or not names:
        raise UsageError(f'hf:{path}: names no model, as in "architectures": ["LlamaForCausalLM"].')
    if not str(names[0]).endswith(LANGUAGE):
        raise UsageError(
            f"hf:{path}: {names[0]} is no language model with a loss of its own, whose class ends "
            f"with {', '.join(LANGUAGE)}. Others: shoal.plan(model, ...)."
        )
    return str(names[0])
