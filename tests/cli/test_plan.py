"""`shoal plan`: its screen, its exit status, and bad input in one error."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shoal.cli import program
from shoal.costs.machine import PRESETS
from shoal.platform.optional_packages import is_installed

SMALL = ("--model.options", "{widths: [8, 16]}")


def shoal(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        program.main(words)
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def _no_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
def test_the_screen_ends_with_the_command_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("plan", "digits", "-n", "2", *SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "NOT CALIBRATED" in "\n".join(lines)
    assert lines[-1].startswith("shoal train digits '--model.options={widths: [8, 16]}' -n 2 ")
    assert " -n 2 --strategy " in lines[-1]


def test_images_that_are_not_here_are_planned_by_their_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--model.name", "mlp", "--model.options", "{hidden: [8]}", "--strategy", "ddp")
    assert shoal("plan", "cifar10_resnet18", "-n", "2", *words) == 0
    screen = capsys.readouterr()
    assert screen.err == (
        "note: data.path: there is no directory data/cifar10 with the files of cifar-10; the plan "
        "is for images of 3 x 32 x 32 in 10 classes\n"
    )
    assert "a step:" in screen.out


def test_a_calibration_in_the_cache_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    PRESETS["h100"].save(tmp_path / "cache" / "shoal" / "machine.json")
    assert shoal("plan", "digits", *SMALL) == 0
    assert "H100" in capsys.readouterr().out


def test_one_strategy_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("plan", "digits", "-n", "2", "--strategy", "zero3", *SMALL) == 0
    out = capsys.readouterr().out
    for word in ("parameters", "gradients", "optimizer", "activations", "gathered", "a step:"):
        assert word in out


def test_what_does_not_fit_exits_with_1_and_names_the_smallest_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--memory", "700KiB", "--train.batch_size=64", *SMALL)
    assert shoal("plan", "digits", "-n", "1", *words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "does not fit by" in "".join(lines)
    at = lines.index("the smallest changes that make it fit:")
    assert lines[at - 1].startswith("nothing fits; recompute comes nearest, and lacks ")
    run = "  shoal train digits --train.batch_size=64 '--model.options={widths: [8, 16]}' -n"
    fewer, more = lines[at + 1 :]
    assert fewer.startswith(f"{run} 1 --train.accumulate 2 --strategy single    # ")
    assert more.startswith(f"{run} 2 --strategy ddp    # ")


def test_micro_batches_of_the_simplest_strategy_stand_beside_another_strategy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--memory", "500KiB", "--strategy", "ddp", "--train.batch_size=64", *SMALL)
    assert shoal("plan", "digits", "-n", "2", *words) == 1
    lines = capsys.readouterr().out.splitlines()
    changes = lines[lines.index("the smallest changes that make it fit:") + 1 :]
    first, second = (line.partition(" -n 2 ")[2] for line in changes)
    assert first.startswith("--strategy pipeline=2    # ")
    assert second.startswith("--train.accumulate 2 --strategy ddp    # ")


def test_what_no_change_makes_fit_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--memory", "1KiB", "--train.batch_size=2", "--strategy", "single", *SMALL)
    assert shoal("plan", "digits", *words) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "no change makes it fit"


@pytest.mark.skipif(not is_installed("matplotlib"), reason="pip install shoal[plots]")
def test_a_plan_is_drawn(tmp_path: Path) -> None:
    words = ("--strategy", "zero3", "-o", str(tmp_path / "plan.svg"), *SMALL)
    assert shoal("plan", "digits", "-n", "2", *words) == 0
    drawn = (tmp_path / "plan.svg").read_text()
    assert drawn.startswith("<?xml")
    assert shoal("plan", "digits", "-n", "2", "--memory", "1KiB", *words[:2], *SMALL) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-o", "plan.doc"), "-o plan.doc: unknown suffix '.doc'; known: .png .svg .pdf"),
        (("-o", "plan"), "-o plan: unknown suffix ''"),
        (("-o", "FILE/plan.png"), "FILE is no directory"),
        (("-o",), "expected one argument"),
        (("-o", "plan.png", "--memory", "much"), "--memory: 'much'"),
    ],
    ids=["suffix", "no suffix", "no directory", "no file", "memory"],
)
def test_a_picture_that_cannot_be_drawn_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    (tmp_path / "FILE").touch()
    words = tuple(word.replace("FILE", str(tmp_path / "FILE")) for word in words)
    assert shoal("plan", "digits", *SMALL, *words) == 2
    assert message.replace("FILE", str(tmp_path / "FILE")) in capsys.readouterr().err


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("plan", "digits", "-n", "2", "--json", *SMALL) == 0
    read = json.loads(capsys.readouterr().out)["result"]
    assert read["best"] in [plan["strategy"] for plan in read["plans"]]
    assert read["calibrated"] is False


def test_servers_are_counted_by_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("plan", "digits", "-n", "4", "--servers", *SMALL) == 0
    out = capsys.readouterr().out
    assert "the exchange alone gains from up to" in out
    assert "ring" in out
    assert "assumed: workers of one pace" in out
    assert "NOT CALIBRATED" in out
    assert out.splitlines()[1].startswith("no servers: a ring is as fast, or faster: shoal train ")


def lines_of_servers(capsys: pytest.CaptureFixture[str], cluster: Path, hosts: str) -> list[str]:
    cluster.write_text(f"hosts: {{{hosts}}}")
    large = ("--model.name", "mlp", "--model.options.hidden", "[8192, 4096]")
    words = ["plan", "digits", "--servers", *large, "--cluster", str(cluster)]
    assert shoal(*words) == 0
    return capsys.readouterr().out.splitlines()


def test_servers_are_advised_where_they_are_faster_than_a_ring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = "link: {bandwidth: 100Mbit/s}"
    alone = ", ".join(f"{name}: {{ranks: 1, {link}}}" for name in "abcdefgh")
    lines = lines_of_servers(capsys, tmp_path / "alone.yaml", alone)
    assert lines[1].startswith("8 servers, on hosts of their own (a ring is beaten from 6 on): ")
    assert "--hosts a:1,b:1,c:1," in lines[1]
    assert lines[1].endswith("--server-hosts SERVERS --strategy server=8")
    spare = f"{alone}, s: {{ranks: 0, {link}}}, t: {{ranks: 0, {link}}}"
    lines = lines_of_servers(capsys, tmp_path / "spare.yaml", spare)
    assert lines[0].split(", ")[1] == "workers: 8"
    assert lines[1].endswith("h:1 --server-hosts s,t --strategy server=8")
    # The workers of a host share its link, and a ring passes it once.
    shared = ", ".join(f"{name}: {{ranks: 2, {link}}}" for name in "ab")
    lines = lines_of_servers(capsys, tmp_path / "shared.yaml", shared)
    assert lines[1].startswith("no servers: a ring is as fast, or faster: shoal train digits ")
    assert "--hosts a:2,b:2 --strategy ddp" in lines[1]
    assert "a worker's share 6.0 MiB/s" in lines[3]


def test_more_than_eight_hosts_are_started_by_slurm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = ", ".join(f"node{index}: {{ranks: 2}}" for index in range(9))
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(f"hosts: {{{hosts}}}")
    assert shoal("plan", "digits", "--cluster", str(cluster), *SMALL) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert " --slurm --nodes 9 --ntasks-per-node 2 --strategy " in last


def test_an_order_that_follows_unequal_errors_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("plan", "digits", "-n", "2", *SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("strategy "))
    table = lines[header + 1 : lines.index("", header)]
    seconds = [milliseconds_of(line) for line in table]
    says_so = "in the order of the longest time that a strategy's own error allows" in "\n".join(
        lines
    )
    assert says_so == (seconds != sorted(seconds))
    assert says_so, "servers stand behind slower plans: they are predicted less well"


def milliseconds_of(row: str) -> float:
    """Return the time of a step in a row of the table."""
    number, unit = re.findall(r" ([\d.]+) (us|ms|s)\b", row)[0]
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def test_failures_are_priced(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("plan", "digits", "-n", "2", "--mtbf", "100h", *SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "(Daly)" in "".join(lines[-6:-1])
    assert lines[-1].startswith("shoal train digits")


def test_all_bad_input_comes_in_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("hosts: {a: {ranks: 2, link: {bandwidth: -1GB/s}}}\ncolour: red\n")
    words = ("-n", "2", "--train.batch_size", "0", "--cluster", str(cluster))
    assert shoal("plan", "digits", *words) == 2
    error = capsys.readouterr().err
    for problem in (
        "hosts.a.link.bandwidth",
        "colour: is not known",
        "-n and --cluster",
        "train.batch_size",
    ):
        assert problem in error


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--memory", "lots", "'lots' is not a number with a unit, as in 16GiB"),
        ("--mtbf", "0h", "0h must be greater than 0"),
        ("--save", "9", "'9' is not a number with a unit"),
    ],
)
def test_a_quantity_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], option: str, text: str, message: str
) -> None:
    assert shoal("plan", "digits", option, text) == 2
    assert f"argument {option}: {message}" in capsys.readouterr().err


def test_a_machine_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("plan", "digits", "--machine", "h10") == 2
    assert "did you mean 'h100'?" in capsys.readouterr().err
