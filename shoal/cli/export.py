"""`shoal export`: write the full model of a run to one file, or to a directory of shards.

It runs in one process and reads the shards of a checkpoint one tensor at a time.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from shoal.cli import answers, argument_types
from shoal.costs.cluster import read_size

HELP = "write a run's whole model to one safetensors file, or to shards as the Hub has them"
EXAMPLES = """\
  shoal export runs/digits                           the newest checkpoint, as model.safetensors
  shoal export runs/digits --checkpoint best -o best.safetensors
  shoal export runs/digits -o llama --dtype bf16     a directory of shards with their index
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=argument_types.path, help="run directory")
    parser.add_argument(
        "-o",
        "--output",
        type=argument_types.path,
        default=Path("model.safetensors"),
        help="a .safetensors file, or a directory for shards (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="convert floating-point tensors to it"
    )
    parser.add_argument(
        "--max-shard-size",
        type=argument_types.quantity(read_size, ", as in 5GB"),
        metavar="SIZE",
        help="largest file of a directory (default: 5GB); a larger tensor has its own",
    )
    argument_types.checkpoint_argument(parser)


def run(options: argparse.Namespace) -> int:
    from shoal.train.weight_export import export

    result = export(
        options.run, options.output, options.checkpoint, options.dtype, options.max_shard_size
    )
    weights = "moving average of the weights" if result.from_ema else "weights"
    text = (
        f"{options.output}: {weights} of step {result.step}, {result.tensors} tensors, "
        f"{result.size_bytes:,} bytes" + (f" in {result.files} files" * (result.files > 1))
    )
    return answers.show(options, {"file": str(options.output), **asdict(result)}, text)
