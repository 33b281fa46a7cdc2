"""Write `recorded/`, or a part of it: `python -m tests.behaviour.record PART [NAME ...]`.

The package's docstring says when. Nothing that stands there is lost: records of other names stay,
and an archive that is there is not written again.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Ranks find imported what is imported here, and start the sooner.
import matplotlib.figure  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
from torch import Tensor

from . import circumstances, files, interface, quotations, runs, saved


def record_runs(names: Sequence[str]) -> None:
    """Measure seeded runs, twice: what differs between two runs of one program is no record."""
    found = files.read("runs") if names else {"circumstances": circumstances.here(), "runs": {}}
    if found["circumstances"] != circumstances.here():
        raise SystemExit("the other runs were recorded under other circumstances: record them all")
    weights = files.read_tensors("runs") if names else {}
    for name in names or runs.RUNS:
        found["runs"][name] = {}
        for precision in runs.PRECISIONS:
            ranks, again = runs.measure(name, precision), runs.measure(name, precision)
            entry = [rank.to_json() for rank in ranks]
            if entry != [rank.to_json() for rank in again]:
                raise SystemExit(f"{name} in {precision} is not the same twice")
            found["runs"][name][precision] = entry
            if precision == "fp64":
                weights[name] = ranks[0].weights
        print(name, flush=True)
    files.write("runs", found)
    files.write_tensors("runs", weights)


def record_saved(names: Sequence[str]) -> None:
    """Save archives that are not there yet, go on with each, and note what comes of it."""
    for name in names or [*saved.SAVED, saved.RECORDED]:
        if not (saved.ARCHIVES / f"{name}.tar.xz").exists():
            with tempfile.TemporaryDirectory() as parent:
                directory = Path(parent) / "run"
                begin = saved.begin_recorded if name == saved.RECORDED else saved.begin
                begin(*([directory] if name == saved.RECORDED else [name, directory]))
                saved.pack(directory, name)
            print(f"{name} saved", flush=True)
    found: dict[str, Any] = files.read("saved") if names else {"resumed": {}}
    ended = files.read_tensors("saved") if names else {}
    found["circumstances"] = circumstances.here()
    for name, strategy, ranks in saved.RESUMED:
        if not names or name in names:
            key = saved.key(name, strategy, ranks)
            found["resumed"][key], ended[key] = _resumed(name, strategy, ranks)
            print(key, flush=True)
    found["evaluated"], found["exported"] = _evaluated(), _exported()
    files.write("saved", found)
    files.write_tensors("saved", ended)


def _resumed(name: str, strategy: str, ranks: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What comes of going on with an archive, and the numbers that are compared by value."""
    digests = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as parent:
            directory = saved.unpack(name, Path(parent) / "run")
            tensors = saved.go_on(directory, strategy, ranks)
            keys = saved.keys(saved.last_checkpoint(directory))
            digests.append(circumstances.digest(tensors))
    if len(set(digests)) > 1:
        raise SystemExit(f"{name} under {strategy} is not the same twice")
    return {"bits": digests[0], "keys": keys}, saved.compared_by_value(tensors)


def _evaluated() -> dict[str, dict[str, float]]:
    """What is said about each archive as it is."""
    found = {}
    for name in saved.SAVED:
        with tempfile.TemporaryDirectory() as parent:
            found[name] = saved.evaluated(saved.unpack(name, Path(parent) / "run"))
    return found


def _exported() -> dict[str, str]:
    """The digest of the model in each archive."""
    found = {}
    for name in saved.SAVED:
        with tempfile.TemporaryDirectory() as parent:
            directory = saved.unpack(name, Path(parent) / "run")
            model = saved.exported(directory, Path(parent) / "model.safetensors")
            found[name] = circumstances.digest(model)
    return found


def record_interface(_: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        files.write("interface", interface.recorded_now(Path(directory)))


def record_error_texts(_: Sequence[str]) -> None:
    """Add what tests quote today; what they quoted before stays."""
    path = files.RECORDED / "error_texts.json"
    before = files.read("error_texts") if path.exists() else {}
    files.write("error_texts", dict(sorted({**quotations.quoted(), **before}.items())))


PARTS: dict[str, Callable[[Sequence[str]], None]] = {
    "runs": record_runs,
    "saved": record_saved,
    "interface": record_interface,
    "error_texts": record_error_texts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("names", nargs="*", help="of runs or archives; without any, all")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    files.RECORDED.mkdir(exist_ok=True)
    for part in PARTS if options.part == "all" else [options.part]:
        PARTS[part](options.names)
        print(f"{part} recorded", flush=True)


if __name__ == "__main__":
    main()
