"""`shoal import`: train from the weights in a file.

It is `shoal train` with the setting `model.weights`.
"""

from __future__ import annotations

import argparse

from shoal.cli import argument_types, train
from shoal.errors import UsageError

HELP = "train an experiment from the weights in a file"
EXAMPLES = """\
  shoal import model.safetensors digits -n 2             train on from a file of weights
  shoal import resnet18.pt my.yaml --train.epochs 5      a state dict of torch
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        type=argument_types.path,
        metavar="FILE",
        help="weights of this very model, under its own names; or a directory of them",
    )
    train.arguments(parser)


def run(options: argparse.Namespace) -> int:
    if not options.file.exists():
        raise UsageError(f"there is no file {options.file}")
    options.settings = [*options.settings, ("model.weights", str(options.file))]
    return train.run(options)
