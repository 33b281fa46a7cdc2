"""`shoal plan-tensor`: print how tensor parallelism divides a model."""

from __future__ import annotations

import argparse

from shoal.cli import answers, argument_types, job_options
from shoal.errors import raise_problems

HELP = "list which module of a model tensor=T slices how"
EXAMPLES = """\
  shoal plan-tensor stdlib_gpt -t 4
  shoal plan-tensor my.yaml --strategy tensor=2,sequence=true
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    job_options.arguments(parser)
    parser.add_argument(
        "-t",
        "--tensor",
        type=argument_types.integer(1, 1 << 20),
        metavar="T",
        help="ranks in a tensor group (default: those of --strategy, or 2)",
    )


def run(options: argparse.Namespace) -> int:
    """Print the plan. The options of `tensor` are those of the experiment, if it has them."""
    settings, line = job_options.settings(options, 1)
    from shoal.train import job_precheck

    raise_problems(job_precheck.problems(settings.job))  # before torch, which takes seconds
    from dataclasses import replace

    import torch

    from shoal.strategies.options import TensorOptions
    from shoal.strategies.tensor.strategy import TensorParallel, describe, tensor_plan
    from shoal.train.build import build

    given = [spec.options for spec in line.specs if isinstance(spec.options, TensorOptions)]
    tensor_options = given[0] if given else TensorOptions()
    degree = options.tensor or tensor_options.degree
    strategy = TensorParallel(**vars(replace(tensor_options, degree=degree)))
    model = build(settings.job, torch.device("cpu")).model
    plan = tensor_plan(model, strategy)
    result = {"tensor": degree, "modules": plan.parallel_styles()}
    return answers.show(options, result, "\n".join(describe(plan, strategy.sequence)))
