"""Flags and verbs of torchrun, accelerate, deepspeed, horovodrun, lightning and sbatch.

One that means the same is accepted in place of ours. One that does not is answered by a sentence
that says what to write.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from shoal.cli import argument_types

_PROCESSES = "-np --np --nproc --nproc-per-node --num-processes --num-gpus --devices --gpus"
"""Other words for -n."""
_INSTEAD = {
    "--standalone --master-addr --master-port --rdzv-backend --rdzv-id --rdzv-endpoint "
    "--main-process-ip --main-process-port --rdzv-conf": (
        "ranks of one machine meet by themselves, and those of several at the first host, which "
        "--address names where it has several addresses. Leave it out"
    ),
    "--nnodes --num-nodes --num-machines --node-rank --machine-rank": (
        "one command starts the ranks of all machines: --hosts a:4,b:4 by ssh, or --slurm "
        "--nodes 2 --ntasks-per-node 4"
    ),
    "--mixed-precision --fp16 --bf16": (
        'in a script shoal.init(precision="bf16"), in an experiment --train.precision bf16'
    ),
    "--use-fsdp --use-deepspeed --deepspeed --zero-stage": (
        "sharding is a strategy: --strategy zero3, or zero2 or zero1"
    ),
    "--slurm --nodes --ntasks-per-node --hosts --server-hosts": (
        "`shoal train` and `shoal launch` run on several machines, this verb on one: -n N counts "
        "its processes. `shoal plan --cluster FILE` plans for several"
    ),
    "--servers --num-servers --num-ps --staleness": (
        "servers are a strategy: --strategy server=2, or server=2,staleness=async"
    ),
    "--allreduce": (
        "it is an option of ddp: --strategy ddp,allreduce=ring or tree or hierarchical"
    ),
    "--record": "only runs of `shoal train` can be recorded, for `shoal replay`",
    "--max-restarts": ("`shoal train` restarts by itself (--restarts N); a script is started once"),
    "--hostfile": (
        "name the hosts themselves: --hosts a:2,b:2. Of a file with one HOST:RANKS a line, "
        '--hosts "$(paste -sd, FILE)"'
    ),
    "--kubernetes": (
        "Shoal renders no JobSet. Put your command into the manifest of "
        "docs/clusters.md#kubernetes, and give it to kubectl"
    ),
    "--account --constraint --cpus-per-task --gpus-per-node --gpus-per-task --gres "
    "--job-name --mail-type --mem --qos": (
        "with --slurm it is given to sbatch, by --sbatch-option=NAME=VALUE"
    ),
    "-N -p -t -c -J -A --wait": (
        "options of sbatch are written out: --slurm with --nodes, --ntasks-per-node, --time and "
        "--partition, and all others as --sbatch-option=NAME=VALUE"
    ),
    "--ntasks --tasks-per-node": "with --slurm it is --nodes N --ntasks-per-node M",
    "--multi-gpu": "several processes are -n N. Leave it out",
    "--log-dir": (
        "`--show-output all ... 2>&1 | tee FILE` keeps all lines, each with its rank; with --slurm "
        "the log is NAME-JOB.out, and --show-output all puts the lines of all ranks into it"
    ),
    "--interface": "`--address` names the address at which the first host is reached",
    "--cpu": "without GPUs ranks use the CPU. Leave it out",
    "--no-python": "`shoal launch` starts Python files, and modules with -m",
}
"""Flags -> what to write in their place."""


VERBS = {
    "run": "your own script is `shoal launch -n 2 train.py`, an experiment `shoal train digits`",
    "start": "your own script is `shoal launch -n 2 train.py`, an experiment `shoal train digits`",
    "fit": "an experiment is `shoal train digits -n 2`",
    "resume": "the same command again resumes: `shoal train RUN/config.yaml`",
    "continue": "the same command again resumes: `shoal train RUN/config.yaml`",
    "finetune": "`shoal train NAME_OR_YAML --weights model.safetensors` starts from these weights",
    "import": "`shoal train NAME_OR_YAML --weights model.safetensors` starts from these weights",
    "evaluate": "it is `shoal eval RUN`",
    "validate": "it is `shoal eval RUN`",
    "test": "`shoal eval RUN` evaluates a run, `shoal verify` compares a strategy with one process",
    "plan-pipeline": "it is `shoal schedule pipeline=4,schedule=1f1b`, with a strategy of yours",
    "env": "it is `shoal doctor`",
    "info": "it is `shoal doctor`",
    "check": "`shoal doctor` looks at this machine, `shoal verify` compares a strategy",
    "list": "the built-in experiments are listed by `shoal config`",
    "version": "it is `shoal --version`",
    "help": "it is `shoal --help`, and `shoal VERB --help`",
}
"""Words that a newcomer types in the place of a verb."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of others, which the help does not show."""
    own = {name for action in parser._actions for name in action.option_strings}
    names = [name for each in _PROCESSES.split() for name in _spellings(each) if name not in own]
    parser.add_argument(
        *names,
        dest="processes",
        type=argument_types.processes,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )
    if "--hosts" in own:
        parser.add_argument("-H", dest="hosts", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for flags, sentence in _INSTEAD.items():
        names = [name for each in flags.split() for name in _spellings(each) if name not in own]
        if names:
            argument_types.answer_option(parser, *names, sentence=sentence)


def instead_of_verb(word: str) -> str:
    """Return what to type in the place of a word that is no verb; empty if nothing is known."""
    if word.endswith(".py"):
        return f"a script is started by `shoal launch -n 2 {word}`"
    if word.endswith((".yaml", ".yml")):
        return f"an experiment is started by `shoal train {word} -n 2`"
    return VERBS.get(word, "")


def _spellings(flag: str) -> Iterator[str]:
    """Yield a flag with dashes, and with underscores between its words."""
    yield flag
    if "-" in flag[2:]:
        yield flag[:2] + flag[2:].replace("-", "_")
