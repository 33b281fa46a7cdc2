"""SIGKILL at every single point of a save: before each call that changes the disk, and in the
middle of each write.

Run as a program, this file is the one that dies: it forks a child for every point. A program of its
own, because the test process may have threads, and those do not survive a fork."""

import gc
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import Checkpoints, Saved, durable_io


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((3, 1000), float(step)), "count": torch.tensor(step)}


def die_at(point: int) -> Callable[[], int]:
    """From here on, this process is killed at the `point`-th change of the disk; returns how
    many there were.
    """
    calls = 0

    def deadly(
        original: Callable[..., Any], first: Callable[..., Any] = lambda *_: None
    ) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == point:
                first(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return wrapped

    for name in ("fsync", "rename", "replace", "open", "mkdir", "unlink", "rmdir"):
        setattr(os, name, deadly(getattr(os, name)))

    def half(file: Any, data: Any) -> int:
        return io.FileIO.write(file, memoryview(data).cast("B")[: memoryview(data).nbytes // 2])

    write = deadly(durable_io.HashedFile.write, first=half)
    durable_io.HashedFile.write = write  # type: ignore[method-assign]
    return lambda: calls


def nothing_yet(directory: Path) -> int:
    directory.mkdir(mode=0o755)
    return 1


def one_good(directory: Path) -> int:
    Checkpoints(directory, keep=1).save(1, tensors(1), {"step": 1}, best=True)
    return 2


def leftovers_in_the_way(directory: Path) -> int:
    one_good(directory)
    shutil.copytree(directory / "step-00000001", directory / "step-00000002")
    shutil.copytree(directory / "step-00000001", directory / "step-00000002.tmp")
    return 2


SCENES = {scene.__name__: scene for scene in (nothing_yet, one_good, leftovers_in_the_way)}


def in_child(action: Callable[[], None]) -> int:
    """The exit code of a child that does this: 0, or -9 if it was killed."""
    child = os.fork()
    if child == 0:
        exit_code = 1
        try:
            action()
            exit_code = 0
        finally:
            os._exit(exit_code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_and_recover(directory: Path, step: int, point: int) -> dict[str, Any]:
    """Kill a save of `step` at one point, then load, save step 3 and load again."""

    def save() -> None:
        store = Checkpoints(directory, keep=1)
        die_at(point)
        store.save(step, tensors(step), {"step": step}, best=True)

    exit_code, reports = in_child(save), list[str]()
    store = Checkpoints(directory, keep=1)
    loaded = store.load(reports.append)
    store.save(3, tensors(3), {"step": 3}, best=True)
    after = store.load(reports.append)
    return {
        "exit_code": exit_code,
        "before": step - 1 or None,
        "loaded": loaded and loaded.step,
        "after": after and after.step,
        "whole": loaded is None or is_whole(loaded),
        "reports": reports,
        "left": sorted(os.listdir(directory)),
    }


def is_whole(loaded: Saved) -> bool:
    same = (
        torch.equal(loaded.tensors[name], tensor) for name, tensor in tensors(loaded.step).items()
    )
    return loaded.info == {"step": loaded.step} and all(same)


def sweep(scene: str, parent: Path) -> None:
    """Print one line of JSON for each point at which a save can be killed; the last is of a
    save that was not.
    """
    step = SCENES[scene](parent / scene)
    exit_code, point = -signal.SIGKILL, 0
    while exit_code != 0:
        point += 1
        directory = parent / f"{scene}-{point}"
        shutil.copytree(parent / scene, directory)
        outcome = kill_and_recover(directory, step, point)
        exit_code = outcome["exit_code"]
        print(json.dumps(outcome), flush=True)
        shutil.rmtree(directory)


@pytest.mark.parametrize(
    "scene",
    [
        pytest.param("nothing_yet", marks=pytest.mark.slow),
        "one_good",
        pytest.param("leftovers_in_the_way", marks=pytest.mark.slow),
    ],
)
def test_wherever_a_save_is_killed_a_whole_checkpoint_loads(tmp_path: Path, scene: str) -> None:
    program = [sys.executable, __file__, str(tmp_path), scene]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=100)
    assert ran.returncode == 0, ran.stderr
    *killed, undisturbed = outcomes = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(killed) > 30
    assert {outcome["exit_code"] for outcome in killed} == {-signal.SIGKILL}
    assert undisturbed["exit_code"] == 0
    for outcome in outcomes:
        assert outcome["whole"]
        assert outcome["after"] == 3
        assert outcome["left"] == ["best", "latest", "step-00000003"]
        assert scene == "leftovers_in_the_way" or outcome["reports"] == []
    saved = [outcome["loaded"] == undisturbed["loaded"] for outcome in killed]
    assert all(
        outcome["loaded"] == outcome["before"]
        for outcome, new in zip(killed, saved, strict=True)
        if not new
    )
    assert saved == sorted(saved), "from one point on, the new one is there; before it, the old one"
    assert len(set(saved)) == 2


if __name__ == "__main__":
    gc.freeze()  # so that children share these pages
    sweep(sys.argv[2], Path(sys.argv[1]))
