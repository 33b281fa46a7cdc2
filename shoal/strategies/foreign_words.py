"""Words of other programs in a strategy: `fsdp`, `tp=2`, `zero=1`.

fsdp,tp=2    other words for the same: read as zero3,tensor=2
cp=2         no such strategy: one sentence that says what is nearest
"""

from __future__ import annotations

SAME = {
    "dp": "ddp",
    "data_parallel": "ddp",
    "distributed_data_parallel": "ddp",
    "fsdp": "zero3",
    "fsdp2": "zero3",
    "fully_shard": "zero3",
    "tp": "tensor",
    "tensor_parallel": "tensor",
    "pp": "pipeline",
    "pipeline_parallel": "pipeline",
    "ps": "server",
    "parameter_server": "server",
    "ac": "recompute",
    "activation_checkpointing": "recompute",
    "gradient_checkpointing": "recompute",
    "local_sgd": "local",
}
"""Other words for the same strategy. A dash in them counts as an underscore."""
STAGES = ("zero", "zero_stage")
"""Names whose value is the stage, as in zero=3."""

_DEEPSPEED = "DeepSpeed's stages are zero1, zero2 and zero3 here"
_SEQUENCE = "tensor=T,sequence=true divides the activations along the sequence"
INSTEAD = {
    "hsdp": "hsdp is zero3,hybrid=K here, with K ranks to a group that shards, such as those of "
    "one host",
    "deepspeed": _DEEPSPEED,
    "ds": _DEEPSPEED,
    "horovod": "Horovod's all-reduce is ddp,allreduce=ring here; ddp alone chooses one",
    "ring": "a ring is an option of ddp: ddp,allreduce=ring",
    "cp": f"there is no context parallelism; {_SEQUENCE}",
    "context_parallel": f"there is no context parallelism; {_SEQUENCE}",
    "sp": _SEQUENCE,
    "sequence_parallel": _SEQUENCE,
    "ep": "there is no expert parallelism; ddp trains experts as any other layer",
    "expert_parallel": "there is no expert parallelism; ddp trains experts as any other layer",
    "gpipe": "a schedule belongs to a pipeline: pipeline=2,schedule=gpipe",
    "1f1b": "a schedule belongs to a pipeline: pipeline=2,schedule=1f1b",
    "cut_by": "tensor finds by itself what it cuts; tensor=T,whole=PATTERN leaves modules whole",
    "budget_mb": "recompute=K computes every K-th unit again; `shoal plan` tells what memory "
    "each K takes",
    "async": "steps without waiting are an option of servers: server=2,staleness=async",
    "bf16": "mixed precision is no strategy: shoal.init(precision=...), --train.precision",
    "fp16": "mixed precision is no strategy: shoal.init(precision=...), --train.precision",
    "ga": "gradient accumulation is no strategy: shoal.init(accumulate=...), --train.accumulate",
    "gradient_accumulation": "gradient accumulation is no strategy: shoal.init(accumulate=...), "
    "--train.accumulate",
}
"""Sentences about words that stand for no strategy of one name, with what to write."""


def read_word(name: str, value: str | None) -> tuple[str, str | None]:
    """Return name and value of a strategy in the words of Shoal; unknown ones as they are."""
    plain = _plain(name)
    if plain in STAGES and value in ("1", "2", "3"):
        return f"zero{value}", None
    return SAME.get(plain, name), value


def instead_of(name: str) -> str:
    """Return what to write in the place of a word; empty if it is no word of another program."""
    plain = _plain(name)
    if plain in STAGES:
        return "the stages are zero1, zero2 and zero3"
    return INSTEAD.get(plain, "")


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")
