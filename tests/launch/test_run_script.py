from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import uuid

import pytest
import torch

from shoal.errors import LaunchError, UsageError
from shoal.launch import rank
from shoal.launch.preload import for_script
from tests.harness import local
from tests.harness.process_tree import marked

# Knows nothing of Shoal.
RAW_DDP = """
    import sys
    import helper
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo", init_method="env://")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False))
    model(torch.full((2, 3), float(rank))).sum().backward()
    if rank == 0:
        print(sys.argv[1:], __name__, helper.NAME, world, model.module.weight.grad.tolist())
"""


def written(folder, text, name="script.py"):
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_a_script_that_knows_nothing_of_shoal_runs_as_python_would_run_it(tmp_path, capfd):
    (tmp_path / "helper.py").write_text("NAME = 'beside it'")
    assert local.run(rank.script, (written(tmp_path, RAW_DDP), ["--lr", "3"]), 2) == 0
    printed = capfd.readouterr().out
    assert printed == "['--lr', '3'] __main__ beside it 2 [[1.0, 1.0, 1.0]]\n"


# The model is dropped after its group: without care, two or three rounds of this end in a deadlock
# inside torch.
DROPPED = """
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    def train():
        group = distributed.new_group()
        model = DistributedDataParallel(nn.Linear(64, 64), process_group=group)
        model(torch.randn(32, 64)).sum().backward()
        distributed.destroy_process_group(group)

    distributed.init_process_group("gloo")
    for _ in range(20):
        train()
    distributed.destroy_process_group()
    print("the end", end="")
"""


def test_a_model_may_outlive_its_process_group(tmp_path, capfd):
    assert local.run(rank.script, (written(tmp_path, DROPPED), []), 2) == 0
    assert capfd.readouterr().out == "the end"


def test_handlers_that_a_script_registers_run_at_its_end(tmp_path, capfd):
    script = written(
        tmp_path, "import atexit\natexit.register(print, 'the end')\nprint('the start')"
    )
    assert local.run(rank.script, (script, []), 1) == 0
    assert capfd.readouterr().out == "the start\nthe end\n"


def test_data_loader_workers_start_as_in_any_script(tmp_path, capfd):
    script = written(
        tmp_path, "import multiprocessing\nprint(multiprocessing.get_start_method(allow_none=True))"
    )
    assert local.run(rank.script, (script, []), 1) == 0
    assert capfd.readouterr().out == "None\n"


WITH_WORKERS = """
    import shoal, torch
    from torch.utils.data import DataLoader, TensorDataset

    run = shoal.init()
    loader = run.prepare(DataLoader(TensorDataset(torch.arange(8.0)), 4, num_workers=1))
    print(sum(batch.sum().item() for (batch,) in loader))
"""


@pytest.mark.slow
def test_a_long_name_of_the_temporary_directory_leaves_room_for_sockets(tmp_path):
    temporary = tmp_path / ("t" * 120)  # a socket's address has 108 bytes
    temporary.mkdir()
    command = [sys.executable, "-m", "shoal", "launch", "-n", "2", written(tmp_path, WITH_WORKERS)]
    variables = os.environ | {"TMPDIR": str(temporary)}
    found = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    note, number = found.stdout.splitlines()
    assert note.startswith("note: a loop over a prepared loader took no step. ")
    assert number == "10.0"  # of rank 0: 0 + 1 + 4 + 5


def test_ranks_draw_different_random_numbers_unless_they_are_seeded(tmp_path, capfd):
    script = written(tmp_path, "import numpy, random\nprint(numpy.random.rand(), random.random())")
    assert local.run(rank.script, (script, []), 2, output="all") == 0
    first, second = (
        line.removeprefix("[rank 1] ").split() for line in capfd.readouterr().out.splitlines()
    )
    assert not set(first) & set(second)


def test_a_traceback_begins_in_the_script(tmp_path, capfd):
    path = written(tmp_path, "def f():\n    return 1 / 0\nf()")
    assert local.run(rank.script, (path, []), 1) == 1
    printed = capfd.readouterr().err
    assert printed.startswith(
        "rank 0 of 1 failed: ZeroDivisionError: division by zero\n\n"
        f'Traceback (most recent call last):\n  File "{path}", line 3, in <module>'
    )


def test_an_error_of_shoal_names_the_line_of_the_script(tmp_path, capfd):
    path = written(tmp_path, "import shoal\nrun = shoal.init()\n\nrun.prepare('model.pt')")
    assert local.run(rank.script, (path, []), 1) == 2  # bad input, as of any command
    assert capfd.readouterr().err.endswith(" and loaders. (script.py:4)\n")


STEPS = """
    import torch
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_strategy_that_the_script_never_reads_is_refused_on_several_ranks(
    ranks, tmp_path, capfd, monkeypatch
):
    monkeypatch.setenv("SHOAL_STRATEGY", "zero3")
    # Where a rank of another world is the launcher, its place is none of these ranks'.
    monkeypatch.setenv("SHOAL_RANK_PROCESS", "1 0@localhost:1,torch")
    status = local.run(rank.script, (written(tmp_path, STEPS), []), ranks)
    assert status == (2 if ranks > 1 else 0)
    assert ("--strategy zero3: the script steps" in capfd.readouterr().err) == (ranks > 1)


def test_a_script_that_is_no_python_is_shown_with_its_line(tmp_path, capfd):
    path = written(tmp_path, "x = 1\nif x\n")
    assert local.run(rank.script, (path, []), 1) == 1
    assert f'File "{path}", line 2' in capfd.readouterr().err


def test_a_script_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(LaunchError, match="No such file or directory"):
        for_script(str(tmp_path / "none.py"))


def test_only_what_is_safe_before_a_fork_is_imported_ahead(tmp_path):
    def ahead(text: str) -> list[str]:
        return for_script(written(tmp_path, text))

    assert ahead("import torch.distributed.tensor, torchvision, os\nfrom . import x") == [
        "torch.distributed.tensor"
    ]
    strategy = "from shoal.integrations.lightning import ShoalStrategy"
    assert ahead(strategy) == ["shoal.run", "torch._dynamo"]
    assert ahead("import shoal as s") == ["shoal", "shoal.run", "torch._dynamo"]
    assert "torch._dynamo" in ahead("from torch.optim import SGD")
    assert ahead("if x\n") == []


STARTS_ANOTHER = """
    import os, subprocess, sys, shoal

    if sys.argv[1] == "child":
        run = shoal.init("ddp")
        print("the child is rank", run.rank, "of", run.world_size, flush=True)
    else:
        run = shoal.init("ddp", announce=lambda line: None)
        variables = {"SHOAL_LAUNCHER": "single"} if sys.argv[1] == "single" else {}
        launch = ["-m", "shoal", "launch", "-n", "2"] if sys.argv[1] == "launch" else []
        again = [sys.executable, *launch, __file__, "child"]
        if run.rank == 0:
            options = {"check": True, "timeout": 60, "text": True, "stdout": subprocess.PIPE}
            print(subprocess.run(again, env={**os.environ, **variables}, **options).stdout)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "single", "launch"])
def test_a_program_that_a_rank_starts_is_a_world_of_its_own(tmp_path, capfd, how):
    script = written(tmp_path, STARTS_ANOTHER)
    assert local.run(rank.script, (script, [how]), 2) == 0
    lines = capfd.readouterr().out
    world = 2 if how == "launch" else 1
    assert lines.count(f"the child is rank 0 of {world}") == 1
    if how == "plain":
        assert "started by rank 0 of 2, and no rank of its world" in lines


# One rank alone kills. The other one's parent is by then the process that adopts it, and that was
# the run of the tests: it was killed at two fifths of a run.
KILLS_THE_FORK_SERVER = """\
if os.environ["RANK"] == "0":
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        pytest.param("sys.exit(3)\n", id="exit"),
        pytest.param(KILLS_THE_FORK_SERVER, id="kill"),
    ],
)
def test_nothing_of_the_command_is_alive_when_it_has_ended(tmp_path, end):
    written(tmp_path, "import os, signal, sys, time; import torch\n" + end)
    mark = f"SHOAL_TEST_MARK={uuid.uuid4()}"
    command = [sys.executable, "-m", "shoal", "launch", "-n", "2", "script.py"]
    environment = dict([*os.environ.items(), mark.split("=")])
    # No pipe: its end would be waited for, and that comes when nothing is alive.
    null = subprocess.DEVNULL
    subprocess.run(command, cwd=tmp_path, env=environment, stdout=null, stderr=null, check=False)
    assert marked(mark) == []


def test_a_server_that_was_forked_steps_before_any_script_calls_init(monkeypatch):
    monkeypatch.setenv("SHOAL_STRATEGY", "server=1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(rank, "is_place_taken", lambda: False)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    rank._watch_copies()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(UsageError):
            optimizer.step()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    with pytest.raises(UsageError, match=r"has not called shoal\.init"):
        optimizer.step()


COPIES = """\
import torch
{join}
optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
optimizer.step()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("join", "notes"), [("", 1), ("torch.distributed.init_process_group('gloo')", 0)]
)
def test_copies_of_a_script_that_joins_no_ranks_are_noted_once(tmp_path, capfd, join, notes):
    script = written(tmp_path, COPIES.format(join=join))
    assert local.run(rank.script, (script, []), 2) == 0
    said = capfd.readouterr().err
    assert said.count("each of 2 processes trains a copy of its own") == notes
