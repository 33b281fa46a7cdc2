"""`shoal export`: write the full model of a run to one file.

It runs in one process and reads the shards of a checkpoint one tensor at a time.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from shoal.cli import answers, argument_types

HELP = "write a run's whole model to one safetensors file"
EXAMPLES = """\
  shoal export runs/digits                           the newest checkpoint, as model.safetensors
  shoal export runs/digits --checkpoint best -o best.safetensors
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=argument_types.path, help="run directory")
    parser.add_argument(
        "-o",
        "--output",
        type=argument_types.path,
        default=Path("model.safetensors"),
        help="(default: %(default)s)",
    )
    argument_types.checkpoint_argument(parser)


def run(options: argparse.Namespace) -> int:
    from shoal.train.weight_export import export

    result = export(options.run, options.output, options.checkpoint)
    weights = "moving average of the weights" if result.from_ema else "weights"
    text = (
        f"{options.output}: {weights} of step {result.step}, {result.tensors} tensors, "
        f"{result.size_bytes:,} bytes"
    )
    return answers.show(options, {"file": str(options.output), **asdict(result)}, text)
