"""The command line: one verb, one function. torch is imported inside the verbs, so that --help answers at once."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shoal.config import window
from shoal.errors import ConfigError, EnvironmentConflict, LaunchError, ShoalError, UsageError, did_you_mean

if TYPE_CHECKING:
    from shoal.config import Settings
    from shoal.launch.place import Place

EPILOG = """\
Any setting can be given by its dotted name, e.g. --optimizer.lr 0.1 --train.epochs 5 --seed 3;
`shoal config NAME --explain` lists them all with their meaning, value and origin.

  shoal train digits -n 2                       a built-in experiment on two processes
  shoal train my.yaml --train.batch_size 512    a file of your own
  shoal launch -n 4 train.py                    your own script
  shoal train digits -n 2 --trace               where does a step's time go? then: shoal trace runs/digits
  shoal scale runs/digits 4                     four processes from now on, while it trains
"""


class Parser(argparse.ArgumentParser):
    """argparse that says what is wrong in two lines."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb and exit with its status: 0, 1 for a failed run, 2 for bad input, 75 for 'run me again'."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and not words[0].startswith("-") and words[0] not in VERBS:
            raise UsageError(f"there is no verb '{words[0]}'; {did_you_mean(words[0], VERBS)}")
        parser = _parser()
        settings: list[tuple[str, str]] = []
        if words and words[0] in TAKES_SETTINGS:
            words, settings = _split_settings(words)
        options = parser.parse_args(_with_window(words))
        if options.verb is None:
            parser.print_help()
            raise SystemExit(0)
        options.settings = settings
        raise SystemExit(VERBS[options.verb](options))
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, (ConfigError, EnvironmentConflict, UsageError)) else 1) from None
    except BrokenPipeError:
        # `shoal config digits | head` has read enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def _with_window(words: list[str]) -> list[str]:
    """`--trace` may stand alone, and a name or a script may follow: what no window can be is not taken for one."""
    if words[:1] not in (["train"], ["import"], ["launch"]) or "--trace" not in words:
        return words
    at = words.index("--trace")
    if words[0] == "launch" and _has_script(words[1:at]):
        return words  # the script's own
    follows = words[at + 1] if at + 1 < len(words) else ""
    if follows[:1].isdecimal() and not Path(follows).exists():
        return [*words[:at], f"--trace={follows}", *words[at + 2 :]]
    return [*words[:at], f"--trace={window.DEFAULT}", *words[at + 1 :]]


def _has_script(words: list[str]) -> bool:
    """Whether a word among these, which follow `launch`, is neither an option nor an option's value."""
    before = ""
    for word in words:
        if not word.startswith("-") and before not in LAUNCH_OPTIONS:
            return True
        before = word
    return False


def _parser() -> Parser:
    parser = Parser(
        prog="shoal",
        description="Train one PyTorch model on many devices, by any strategy, with the numbers of one device.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")

    def verb(name: str, help: str, more: str = "") -> argparse.ArgumentParser:
        formatter = argparse.RawDescriptionHelpFormatter
        return verbs.add_parser(name, help=help, description=help + more, epilog=EPILOG, formatter_class=formatter)

    train = verb("train", "train an experiment, on one process or many; the same command again resumes it")
    _job_arguments(train)
    _record_argument(train)
    _trace_argument(train)
    _restarts_argument(train)
    start = verb("import", "train an experiment from the weights in a file: .safetensors, or a state dict of torch's")
    start.add_argument("file", type=Path, metavar="FILE", help="weights of this very model, under its own names")
    _job_arguments(start)
    _record_argument(start)
    _trace_argument(start)
    _restarts_argument(start)
    replay = verb("replay", "do a recorded run of parameter servers again in one process, and compare bit for bit")
    replay.add_argument("run", type=Path, help="run directory, trained with --record")
    replay.add_argument("-o", "--output", type=Path, help="write the model as it is in the end to a .safetensors file")
    replay.add_argument("--step", type=int, metavar="N", help="go as far as the checkpoint of step N, not the newest")
    replay.add_argument("--json", action="store_true", help="print one JSON object")
    scale = verb("scale", "change the number of processes of a run while it trains, under any strategy")
    scale.add_argument("run", type=Path, help="directory of a run that `shoal train ... -n` has started here")
    scale.add_argument("processes", type=int, metavar="N", help="processes from now on")
    export = verb("export", "write a run's whole model to one safetensors file, whatever strategy has trained it")
    export.add_argument("run", type=Path, help="run directory")
    export.add_argument("-o", "--output", type=Path, default=Path("model.safetensors"), help="(default: %(default)s)")
    export.add_argument(
        "--checkpoint", choices=("latest", "best"), default="latest", help="which one (default: latest)"
    )
    config = verb("config", "print an experiment's settings")
    _job_arguments(config)
    config.add_argument("--explain", action="store_true", help="with the meaning and the origin of every value")
    evaluate = verb("eval", "evaluate a run on every validation sample")
    evaluate.add_argument("run", type=Path, help="run directory")
    evaluate.add_argument("-n", "--processes", type=int, help="processes on this machine (default: 1)")
    evaluate.add_argument(
        "--checkpoint", choices=("latest", "best"), default="latest", help="which one (default: latest)"
    )
    evaluate.add_argument("--json", action="store_true", help="print one JSON object with top1, top5, loss, samples")
    verify = verb(
        "verify",
        "prove that a strategy trains a model as one process does, in float64 on the CPU",
        "\n\nexit status: 0 exact; 1 differs, by design or not; 2 refused, or no verdict: bad input, a failed process",
    )
    _job_arguments(verify, "processes to compare with one (default: 2)")
    verify.add_argument("--steps", type=int, default=5, help="optimizer steps, SGD with momentum (default: 5)")
    verify.add_argument("--tolerance", type=float, default=1e-10, help="relative (default: 1e-10)")
    verify.add_argument("--json", action="store_true", help="print one JSON object")
    cuts = verb("plan-tensor", "list which module of a model tensor=T cuts how, and what stays whole")
    _job_arguments(cuts)
    cuts.add_argument("-t", "--tensor", type=int, default=2, metavar="T", help="ranks in a tensor group (default: 2)")
    plot = verb("plot", "draw the curves of one run, or of several in comparison")
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory")
    plot.add_argument(
        "-o", "--output", type=Path, default=Path("curves.png"), help=".png or .svg (default: curves.png)"
    )
    trace = verb(
        "trace",
        "say where the time of traced steps went: compute, communication, waiting for the slowest, data",
        "\n\nhttps://ui.perfetto.dev and chrome://tracing open RUN/trace.json itself",
    )
    trace.add_argument("run", type=Path, metavar="RUN", help="directory of a run trained with --trace, or a trace file")
    trace.add_argument("--json", action="store_true", help="print one JSON object")
    trace.add_argument("-o", "--output", type=Path, help="draw it into this .png or .svg")
    schedule = verb("schedule", "draw a schedule of a pipeline: what each rank computes when, and how long it is idle")
    schedule.add_argument("name", help="naive, gpipe, 1f1b, interleaved, zero-bubble or zbv")
    schedule.add_argument("-p", "--ranks", type=int, default=4, help="ranks of the pipeline (default: 4)")
    schedule.add_argument("-m", "--microbatches", type=int, help="that a batch is split in (default: 8; naive: 1)")
    schedule.add_argument("-v", "--stages", type=int, default=0, help="on each rank, for interleaved and zero-bubble")
    schedule.add_argument("-o", "--output", type=Path, help="draw into this .png or .svg")
    launch = verb("launch", "run your own script on several processes")
    launch.add_argument("-n", "--processes", type=int, required=True, help="processes on this machine")
    launch.add_argument("--strategy", help="what shoal.init() uses in place of the script's own, e.g. ddp")
    _allreduce_argument(launch, "; needs --strategy")
    launch.add_argument("--accumulate", type=int, help="parts that each rank's share of a batch is computed in")
    launch.add_argument(
        "--output", choices=("first", "all"), default="first", help="whose stdout is shown (default: first)"
    )
    _trace_argument(launch)
    launch.add_argument(
        "--trace-to", default=".", metavar="DIR", help="where the script's trace.json goes (default: here)"
    )
    launch.add_argument("script", help="Python file")
    launch.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    servers = verb("servers", "list a running job's parameter servers, add one, or remove one, while it trains")
    servers.add_argument("run", type=Path, help="run directory")
    servers.add_argument("what", nargs="?", choices=("list", "add", "remove"), default="list", help="(default: list)")
    servers.add_argument(
        "numbers", nargs="*", type=int, metavar="N", help="add: how many (default: 1); remove: which shards"
    )
    servers.add_argument("--json", action="store_true", help="print one JSON array, an object for each server")
    doctor = verb("doctor", "look at this machine: versions, devices, backends, and what is missing for which strategy")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _job_arguments(parser: argparse.ArgumentParser, processes: str = "processes on this machine (default: 1)") -> None:
    parser.add_argument("-n", "--processes", type=int, help=processes)
    parser.add_argument("source", nargs="*", metavar="NAME_OR_YAML", help="built-in experiment, or a YAML file")
    _allreduce_argument(parser)
    parser.add_argument("--cfg", type=Path, help="a distribuuuu YAML file; KEY VALUE pairs may follow")
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="FILE", help="register models, data"
    )


def _allreduce_argument(parser: argparse.ArgumentParser, more: str = "") -> None:
    from shoal.comm.algorithms.table import CHOICES

    help = f"algorithm of ddp: {', '.join(CHOICES)}; short for --strategy ddp,allreduce=ALGORITHM{more}"
    parser.add_argument("--allreduce", choices=CHOICES, metavar="ALGORITHM", help=help)


def _record_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record", action="store_true", help="with stale parameter servers: keep the order of pushes, for shoal replay"
    )


def _trace_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        metavar="N@S",
        help=f"trace N steps, after the first S of this start, into trace.json (--trace alone: {window.DEFAULT})",
    )


def _restarts_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--restarts", type=int, help="with -n: how often a run goes on by itself when a process was killed (default: 3)"
    )


def _split_settings(words: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Take `--dotted.name value` and `--dotted.name=value` out of the words; argparse sees the rest."""
    own = {"--cfg", "--import", "--processes", "--explain", "--help", "--json", "--steps", "--tolerance", "--record"}
    own |= {"--tensor", "--allreduce"}
    own |= {"--restarts", "--trace"}
    rest, settings, waiting = [], [], list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in own:
            rest.append(word)
            continue
        if not equals:
            if not waiting:
                raise ConfigError([f"flag {name}: a value is missing"])
            value = waiting.pop(0)
        settings.append((name.removeprefix("--"), value))
    return rest, settings


def _settings(options: argparse.Namespace, ranks: int) -> tuple[Settings, list[str]]:
    """The job that the words describe, and notes to print before it runs."""
    settings, notes = _read_settings(options, ranks, list(options.settings))
    if options.allreduce is None:
        return settings, notes
    from shoal.strategies import with_allreduce

    line = with_allreduce(settings.job.strategy, options.allreduce)
    return _read_settings(options, ranks, [*options.settings, ("strategy", line)])


def _read_settings(options: argparse.Namespace, ranks: int, flags: list[tuple[str, str]]) -> tuple[Settings, list[str]]:
    from shoal import config
    from shoal.strategies import named

    if options.imports:
        flags += [("import", str(Path(file).resolve())) for file in options.imports]
    if options.cfg is not None:
        settings, notes = config.translate(options.cfg, options.source, ranks, flags)
        named(settings.job.strategy)
        return settings, notes
    if len(options.source) != 1:
        given = f"there are {len(options.source)}: {' '.join(options.source)}" if options.source else "there is none"
        raise UsageError(f"one NAME_OR_YAML is needed; {given}. Built in: {', '.join(config.builtin_names())}")
    settings = config.read(options.source[0], flags)
    named(settings.job.strategy)
    return settings, []


def _train(options: argparse.Namespace) -> int:
    from shoal.strategies import refuse_to_record
    from shoal.strategies.early import refusals_of_job
    from shoal.train.directory import refuse

    place = _place(options.processes)
    ranks = options.processes or place.world
    restarts = _restarts(options, place)
    options.settings = [*options.settings, *([("train.record", "true")] if options.record else [])]
    if options.trace is not None:
        options.settings.append(("log.trace", str(options.trace)))
    settings, notes = _settings(options, ranks)
    if settings.job.train.record:
        refuse_to_record(settings.job.strategy)
    if place.rank == 0:
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    if refused := refusals_of_job(settings.job, ranks):
        raise ConfigError(refused)
    if place.world == 1:
        refuse(settings.job)  # said before any process is started; rank 0 claims the directory
    if restarts is not None:
        from shoal.train.lasting import train

        return train(settings.job, ranks, restarts)
    return _on_ranks(place.world, ranks, "train", (settings.job,))


def _restarts(options: argparse.Namespace, place: Place) -> int | None:
    """How often ranks are started again that this command starts; None where it starts none."""
    given = options.restarts
    if given is not None and given < 0:
        raise UsageError(f"--restarts {given}: must not be negative")
    if place.world == 1 and options.processes is not None:
        from shoal.train.lasting import RESTARTS

        return RESTARTS if given is None else given
    if given is not None:
        cure = "Give -n 1 as well" if place.world == 1 else "Use what that launcher has, or leave --restarts out"
        raise UsageError(f"--restarts {given}: this command starts no process ({place.reason}). {cure}.")
    return None


def _scale(options: argparse.Namespace) -> int:
    from shoal.launch.call import call
    from shoal.train.directory import job_of

    job_of(options.run)
    for answer in call(options.run, scale=options.processes):
        if "stopping" in answer:
            print(f"{options.run}: {answer['stopping']} processes stop and save", flush=True)
        else:
            begin = "from the beginning" if answer["step"] is None else f"from the checkpoint of step {answer['step']}"
            print(f"{options.run}: {answer['processes']} go on, {begin}")
            return 0
    raise LaunchError(f"{options.run}: its launcher has ended before it had answered.")


def _import(options: argparse.Namespace) -> int:
    options.settings = [*options.settings, ("model.weights", str(options.file))]
    return _train(options)


def _export(options: argparse.Namespace) -> int:
    from shoal.train.export import export

    done = export(options.run, options.output, options.checkpoint)
    what = "moving average of the weights" if done.averaged else "weights"
    print(f"{options.output}: {what} of step {done.step}, {done.tensors} tensors, {done.size_bytes:,} bytes")
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from shoal.train.directory import job_of

    place = _place(options.processes)
    job_of(options.run)  # a wrong directory is said at once
    arguments = (options.run, options.checkpoint, options.json)
    return _on_ranks(place.world, options.processes or place.world, "evaluate_run", arguments)


def _place(processes: int | None) -> Place:
    """This process's place in its world. Where a launcher made the world, it must be of the size that was asked for."""
    from shoal.launch.environment import read

    if processes is not None and processes < 1:
        raise UsageError(f"-n {processes}: at least one process is needed")
    place = read(os.environ)
    if processes is None or place.launcher == "single":
        return place
    return read({**os.environ, "SHOAL_EXPECTED_WORLD": str(processes)})


def _on_ranks(world: int, ranks: int, function: str, arguments: tuple[object, ...]) -> int:
    """Call a function of shoal.train.entry in every rank: here, or in processes of this machine."""
    if world == 1 and ranks > 1:
        from shoal.launch.local import run
        from shoal.launch.preload import TRAINING
        from shoal.train import entry

        preload = (*TRAINING, "torch.distributed.checkpoint", "shoal.train.loop")
        return run(getattr(entry, function), arguments, ranks, preload=preload)
    from shoal.train import entry

    getattr(entry, function)(*arguments)
    return 0


def _config(options: argparse.Namespace) -> int:
    from shoal import config

    settings, notes = _settings(options, options.processes or 1)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(config.explain(settings) if options.explain else config.to_yaml(settings.job))
    return 0


def _plan_tensor(options: argparse.Namespace) -> int:
    """The options of `tensor` in the experiment's own strategy count, if it has any."""
    settings, _ = _settings(options, 1)
    from dataclasses import replace

    import torch

    from shoal.strategies import parse
    from shoal.strategies.tensor import TensorParallel, lines, plan_of
    from shoal.train.build import build

    chosen = [s for s in parse(settings.job.strategy) if isinstance(s, TensorParallel)] or [TensorParallel()]
    model = build(settings.job, torch.device("cpu")).model
    print("\n".join(lines(plan_of(model, replace(chosen[0], degree=options.tensor)))))
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Exit status: 0 exact, 1 past the tolerance, 2 refused or without a verdict: no failure may read as a finding."""
    try:
        return _verdict(options)
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
    except Exception:  # noqa: BLE001  (Python would end with 1)
        traceback.print_exc()
    return 2


def _verdict(options: argparse.Namespace) -> int:
    options.source = options.source or ["digits"]
    ranks = 2 if options.processes is None else options.processes
    settings, notes = _settings(options, ranks)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    from shoal.train.verification import verify_job

    verdict = verify_job(settings.job, ranks, options.steps, options.tolerance)
    print(json.dumps(verdict.to_json()) if options.json else verdict)
    return {"exact": 0, "refused": 2}.get(verdict.verdict, 1)


def _plot(options: argparse.Namespace) -> int:
    from shoal.plot import plot

    plot(options.runs, options.output)
    print(options.output)
    return 0


def _trace(options: argparse.Namespace) -> int:
    from shoal.plot import refuse_suffix
    from shoal.trace import chrome, report
    from shoal.trace.account import account

    if options.output is not None:
        refuse_suffix(options.output)
    trace = chrome.read(options.run)
    found = account(trace.spans)
    print(json.dumps(report.to_json(trace, found)) if options.json else "\n".join(report.lines(trace, found)))
    if options.output is not None:
        from shoal.plot_trace import save

        save(trace, found, options.output)
        if not options.json:
            print(options.output)
    return 0


def _schedule(options: argparse.Namespace) -> int:
    from shoal.pipeline.draw import explained
    from shoal.pipeline.schedules import table

    microbatches = options.microbatches or (1 if options.name == "naive" else 8)
    chosen = table(options.name, options.ranks, microbatches, options.stages)
    print(explained(chosen))
    if options.output is not None:
        from shoal.plot_schedule import save

        save(chosen, options.output)
        print(options.output)
    return 0


def _launch(options: argparse.Namespace) -> int:
    from shoal.launch.local import run_script
    from shoal.strategies import named, with_allreduce

    place = _place(None)
    if place.world > 1:
        raise UsageError(
            f"`shoal launch` starts ranks itself, but here it is one of {place.world}: {place.reason}. "
            f"Let that launcher start the ranks, without `shoal launch`: python {options.script}"
        )
    if options.allreduce is not None:
        if options.strategy is None:
            raise UsageError("--allreduce: only the script knows its strategy. Say it too: --strategy ddp")
        options.strategy = with_allreduce(options.strategy, options.allreduce)
    if options.strategy is not None:
        named(options.strategy)
    chosen: dict[str, object] = {"SHOAL_STRATEGY": options.strategy, "SHOAL_ACCUMULATE": options.accumulate}
    if options.trace is not None:
        window.parse(options.trace, "--trace")
        chosen |= {"SHOAL_TRACE": options.trace, "SHOAL_TRACE_TO": options.trace_to}
    environment = {name: str(value) for name, value in chosen.items() if value is not None}
    return run_script(options.script, options.arguments, options.processes, environment, options.output)


def _replay(options: argparse.Namespace) -> int:
    """Exit status: 0 the same bits, 1 others."""
    from shoal.train.directory import job_of

    job_of(options.run)  # a wrong directory is said at once
    from shoal.train.replay import replay

    found = replay(options.run, options.output, options.step)
    print(json.dumps(found.to_json()) if options.json else found)
    return 1 if found.differing else 0


def _servers(options: argparse.Namespace) -> int:
    if options.what == "remove" and not options.numbers:
        raise UsageError(f"remove: say which shard, as in `shoal servers {options.run} remove 1`.")
    if options.what == "add" and (len(options.numbers) > 1 or any(number < 1 for number in options.numbers)):
        raise UsageError(f"add: takes one number of at least 1, got {' '.join(map(str, options.numbers))}.")
    if options.what == "list" and options.numbers:
        raise UsageError(f"list: takes no number, got {' '.join(map(str, options.numbers))}.")
    from shoal.server import control

    found = control.command(options.run, options.what, options.numbers)
    print(json.dumps(found) if options.json else control.table(found))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from shoal import doctor

    report = doctor.examine()
    print(doctor.to_json(report) if options.json else doctor.render(report))
    return report.exit_code


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": _train,
    "import": _import,
    "scale": _scale,
    "export": _export,
    "eval": _evaluate,
    "config": _config,
    "verify": _verify,
    "plan-tensor": _plan_tensor,
    "plot": _plot,
    "trace": _trace,
    "schedule": _schedule,
    "launch": _launch,
    "replay": _replay,
    "servers": _servers,
    "doctor": _doctor,
}
LAUNCH_OPTIONS = ("-n", "--processes", "--strategy", "--accumulate", "--output", "--trace-to")
TAKES_SETTINGS = ("train", "import", "config", "verify", "plan-tensor")
