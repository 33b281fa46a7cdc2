"""The job, and the ways of gradients or weights from host to host: the flags of `shoal
train`.
"""

from __future__ import annotations

HOSTS, RATE_MBIT, TARGET_TOP1 = 2, 100, 95.0
YARDSTICK = "ddp"
# Two hosts: there the sum over ranks is Gloo's own all-reduce, as PyTorch's DistributedDataParallel
# does it.
TASK = (
    *("digits", "--model.name", "mlp", "--model.options.hidden", "[1024,1024]"),
    *("--train.epochs", "6"),
    *("--optimizer.lr", "0.05", "--schedule.name", "constant", "--schedule.warmup_epochs", "0"),
    *("--log.tensorboard", "false", "--checkpoint.every_epochs", "1000"),
)
WAYS = (
    YARDSTICK,
    "ddp,compress=bf16",
    "ddp,compress=fp16",
    "ddp,compress=powersgd=4",
    "ddp,compress=topk=0.01",
    "ddp,compress=onebit",
    "local=16",
    "diloco=16",
)
