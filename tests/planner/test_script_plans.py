"""`shoal plan train.py`: a script is planned up to its first backward pass, and leaves nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.cli import program
from shoal.planner.plan_report import as_json
from shoal.strategies.loss_terms import LOOP_IN_PIPELINE, LOOP_IN_SERVERS

HEAD = """\
    import sys
    import torch, torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import shoal

    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
    model.to("cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(50, 16), torch.randint(0, 4, (50,)))
    loader = DataLoader(data, batch_size=12, shuffle=True)
    """
FUNCTION = """\
    run = shoal.init("zero3")
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    try:
        for x, y in loader:
            optimizer.zero_grad()
            loss = run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
            optimizer.step()
            torch.save(float(loss), "loss.pt")
    finally:
        torch.save(model.state_dict(), "model.pt")
    """
LOOP_OF_RUN = """\
    run = shoal.init()
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    average = run.ema(0.9)
    checkpoint = run.checkpoint("checkpoints")
    step = checkpoint.resume()
    run.log_to("jsonl", directory="log", step=step)
    sums = run.evaluate(lambda x, y: {"loss": model(x).square().sum()}, loader)
    print(f"before: {sums['loss'] / sums['samples']:.3f}")
    for x, y in loader:
        optimizer.zero_grad()
        run.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        checkpoint.save(step + 1)
    """
MICROBATCHES = """\
    run = shoal.init(accumulate=3)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for batch in loader:
        optimizer.zero_grad()
        for x, y in run.microbatches(batch):
            run.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    """
OWN_BATCHES = """\
    run = shoal.init()
    model, optimizer = run.prepare(model, optimizer)

    def draw():
        index = torch.randint(len(data), (12,))
        return run.share(data[index])

    x, y = draw()
    while True:
        with torch.no_grad():
            print(f"{sum(F.cross_entropy(model(x), y).item() for x, y in [draw()] * 2):.3f}")
        loss = F.cross_entropy(model(x), y)
        x, y = draw()
        run.backward(loss)
    """
PLAIN = """\
    model(torch.randn(3, 16))  # a trial, which is no step
    for x, y in loader:
        model.eval()
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(loss.item())
    """
DISTRIBUTED = """\
    model = nn.parallel.DistributedDataParallel(model)
    """


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


def shoal_plan(script: Path, *parts: str, words: tuple[str, ...] = ()) -> int:
    script.write_text("\n".join(map(dedent, parts)))
    with pytest.raises(SystemExit) as ended:
        program.main(["plan", str(script), "-n", "2", *words])
    return int(ended.value.code or 0)


def memory_of(plans: dict[str, Any]) -> dict[str, Any]:
    return {plan["strategy"]: plan["memory"] for plan in plans["plans"]}


def planned(batch_size: int, accumulate: int = 1) -> dict[str, Any]:
    """Return what `shoal.plan` says of the same model."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    sample = (torch.zeros(batch_size, 16), torch.zeros(batch_size, dtype=torch.long))
    found = shoal.plan(
        *(model, optimizer, sample, lambda x, y: F.cross_entropy(model(x), y)),
        ranks=2,
        accumulate=accumulate,
    )
    return as_json(found.planner, found.plans)


@pytest.mark.parametrize(
    ("parts", "batch_size"),
    [
        pytest.param((HEAD, FUNCTION), 12, marks=pytest.mark.slow),
        ((HEAD, LOOP_OF_RUN), 12),
        ((HEAD, OWN_BATCHES), 12),
        pytest.param((HEAD, MICROBATCHES), 12, marks=pytest.mark.slow),
        ((HEAD, PLAIN), 12),
        ((HEAD, DISTRIBUTED, PLAIN), 24),  # its batches are those of one rank
    ],
    ids=[
        "function",
        "loop of a run",
        "own batches",
        "micro-batches",
        "plain loop",
        "DistributedDataParallel",
    ],
)
def test_a_script_is_planned_as_its_model_alone(
    script: Path, capsys: pytest.CaptureFixture[str], parts: tuple[str, ...], batch_size: int
) -> None:
    assert shoal_plan(script, *parts, words=("--json",)) == 0
    found = json.loads(capsys.readouterr().out)["result"]
    alone = planned(batch_size, 3 if MICROBATCHES in parts else 1)
    for key in ("parameters", "global_batch", "best"):
        assert found[key] == alone[key]
    memory = memory_of(alone)
    refused = dict(alone["refused"])
    for line in (*memory, *refused):  # a loop has its loss before a stage could ask for it
        if "pipeline" in line and {LOOP_OF_RUN, OWN_BATCHES, MICROBATCHES} & {*parts}:
            memory.pop(line, None)
            refused[line] = LOOP_IN_PIPELINE
        elif "server" in line and MICROBATCHES in parts:
            memory.pop(line, None)
            refused[line] = LOOP_IN_SERVERS
    assert found["refused"] == refused
    if DISTRIBUTED in parts:  # counted on a rank's batch, and alone on that of both: single numbers
        memory = {line: pytest.approx(held, abs=8) for line, held in memory.items()}
    assert memory_of(found) == memory
    assert [path.name for path in script.parent.iterdir() if path.name != "cache"] == ["train.py"]


def test_what_makes_a_script_fit_is_a_line_to_be_copied(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--strategy", "ddp", "--memory", "95kB", "--", "--epochs", "3")
    assert shoal_plan(script, HEAD, FUNCTION, words=words) == 1
    out = capsys.readouterr().out
    assert "does not fit by" in out
    assert f"  shoal launch -n 2 --strategy zero1 {script} --epochs 3    # " in out


def test_a_plain_script_is_told_what_it_lacks_and_a_terminal_what_takes_time(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert shoal_plan(script, HEAD, PLAIN) == 0
    screen = capsys.readouterr()
    assert "the script has no shoal.init()" in screen.out
    assert screen.err.startswith(f"shoal: following {script} to its first backward pass")


TWO_VIEWS = """\
    run = shoal.init()
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    norm = sum(weight.square().sum() for weight in run.weights().values())
    for x, y in loader:
        with torch.no_grad():
            run.call(model, x)
        z = run.gather(model(torch.cat([x, x + 1])), views=2)
        run.backward(z[run.rows].square().mean())
    """


def test_a_batch_of_two_views_has_the_samples_of_its_loader(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shoal_plan(script, HEAD, TWO_VIEWS, words=("--json",)) == 0
    assert json.loads(capsys.readouterr().out)["result"]["global_batch"] == 12


NO_LOADER = """\
    for _ in range(3):
        F.cross_entropy(model(torch.randn(8, 16)), torch.zeros(8, dtype=torch.long)).backward()
    """
TWO_MODELS = """\
    second = nn.Linear(4, 4)
    for x, y in loader:
        F.cross_entropy(second(model(x)), y).backward()
    """
TWO_PREPARED = """\
    second = nn.Linear(4, 4)
    run = shoal.init()
    model, second = run.prepare(model, second, optimizer)[:2]
    run.forward_backward(lambda x: model(x).mean(), torch.randn(8, 16))
    """
COMPILED = """\
    run = shoal.init(compile=True)
    model, optimizer = run.prepare(model, optimizer)
    run.forward_backward(lambda x: model(x).mean(), torch.randn(8, 16))
    """


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('nothing')", "ended without a backward pass. Give it arguments with which it"),
        ("if model[0].weight.sum() > 0: print(1)", "train.py:13 asks for the value of a tensor"),
        ("raise ValueError('no data')", "train.py:13 fails on weights without memory with ValueE"),
        ("sys.exit()", "ended without a backward pass"),
        (NO_LOADER, "takes its batches from no torch.utils.data.DataLoader"),
        (TWO_MODELS, "trains several models"),
        (TWO_PREPARED, "trains several models"),
        (COMPILED, "what a compiled model costs is not known"),
    ],
    ids=["no step", "value", "error", "exit", "no loader", "models", "prepared", "compile"],
)
def test_a_script_that_cannot_be_followed_is_refused_with_the_cure(
    script: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert shoal_plan(script, HEAD, text) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent.py"], "plan: there is no script absent.py"),
        (["train.py", "--train.batch_size", "3"], "come after --: shoal plan train.py -- --train"),
        (["train.py", "--strategy", "zero9"], "'zero9' is not known"),
        (["train.py", "--memory", "much"], "--memory: 'much' is not a number with a unit"),
        (["digits", "--", "--epochs", "3"], "words after --: only for a script"),
    ],
    ids=["absent", "setting", "strategy", "memory", "words of no script"],
)
def test_wrong_words_are_one_error_before_the_script_runs(
    script: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    script.write_text("raise SystemError('it ran')")
    with pytest.raises(SystemExit) as ended:
        program.main(["plan", *words])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "it ran" not in error
