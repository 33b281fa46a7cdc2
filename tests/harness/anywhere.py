"""`python -m tests.harness.anywhere [NAME ...]`: the everyday tests as on other machines.

Each setting runs the folders of tests that it can touch, and its row of the table in
CONTRIBUTING.md is written anew. Some settings need root, `taskset` or `localedef`; where that is
missing the row stays as it was. All of them take hours: it is a job for the night.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- anywhere: begin -->", "<!-- anywhere: end -->"
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")
NUMBERS = ("comm", "data", "models", "optim", "run", "strategies", "train", "trial", "verification")
WAITS = ("hosts", "launch", "parameter_server", "run", "shm_backend", "strategies", "watchdog")
TEXTS = (
    *("bad_input", "cli", "config", "data", "doctor", "examples", "kubernetes"),
    *("launch", "platform", "plotting", "security", "slurm", "trace", "train"),
)
SUM_ORDER = str(Path(__file__).with_name("sum_order"))
NOBODY = 65534


@dataclass(frozen=True)
class Setting:
    """One setting of another machine.

    Args:
        what: its name in the table.
        folders: of tests that it can touch; all where there are none.
        environment: variables.
        prefix: words before the command.
        arguments: of pytest.
        beside: processes that run at the same time, each this command.
        needs_root: it cannot be made by others.
    """

    what: str
    folders: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    prefix: Sequence[str] = ()
    arguments: Sequence[str] = ()
    beside: Sequence[Sequence[str]] = ()
    needs_root: bool = False


def in_shell(commands: str) -> tuple[str, ...]:
    """Return the words that run commands of a shell before the command that follows."""
    return ("sh", "-c", f'{commands} && exec "$@"', "sh")


SETTINGS: dict[str, Setting] = {
    "sums": Setting(
        "another order of sums",
        NUMBERS,
        {"PYTHONPATH": SUM_ORDER},
    ),
    "wide-sums": Setting(
        "sums of float32 in float64", NUMBERS, {"PYTHONPATH": SUM_ORDER, "SHOAL_TEST_SUMS": "wide"}
    ),
    "aten-default": Setting(
        "`ATEN_CPU_CAPABILITY=default`", NUMBERS, {"ATEN_CPU_CAPABILITY": "default"}
    ),
    "aten-avx2": Setting("`ATEN_CPU_CAPABILITY=avx2`", NUMBERS, {"ATEN_CPU_CAPABILITY": "avx2"}),
    "one-core": Setting("one core", WAITS, prefix=("taskset", "-c", "0")),
    "busy": Setting(
        "four busy processes beside it",
        WAITS,
        beside=[[sys.executable, "-c", "while True: pass"]] * 4,
    ),
    **{
        f"order-{seed}": Setting(f"random order {seed}", arguments=("--order-seed", str(seed)))
        for seed in (1, 2, 3)
    },
    "not-root": Setting(
        "a user who is not root",
        TEXTS,
        {"HOME": "/nonexistent"},
        ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
        ("-p", "no:cacheprovider"),
        needs_root=True,
    ),
    "umask": Setting("umask 077", TEXTS, prefix=in_shell("umask 077")),
    "turkish": Setting("`LC_ALL=tr_TR.UTF-8`", TEXTS, {"LC_ALL": "tr_TR.UTF-8"}),
    "c-locale": Setting("`LC_ALL=C`", TEXTS, {"LC_ALL": "C"}),
    "kathmandu": Setting("`TZ=Asia/Kathmandu`", TEXTS, {"TZ": "Asia/Kathmandu"}),
    "tmpdir": Setting("`TMPDIR` with a blank and an umlaut", TEXTS, {"TMPDIR": "ä b"}),
    "small-shm": Setting(
        "64 MiB of /dev/shm",
        (*WAITS, "data", "train"),
        prefix=("unshare", "-m", *in_shell("mount -t tmpfs -o size=64m tmpfs /dev/shm")),
        needs_root=True,
    ),
    "no-ipv6": Setting(
        "no IPv6",
        (*WAITS, "platform", "security"),
        prefix=(
            "unshare",
            "-n",
            *in_shell("ip link set lo up && sysctl -qw net.ipv6.conf.all.disable_ipv6=1"),
        ),
        needs_root=True,
    ),
}


@contextmanager
def places(setting: Setting) -> Iterator[dict[str, str]]:
    """Make the directories and the locale that a setting needs. Yields all variables.

    Names are short: those of sockets in the directories end at 107 bytes, and torch's own workers
    wait for ever where they do not fit.
    """
    with tempfile.TemporaryDirectory(prefix="any-") as directory:
        os.chmod(directory, 0o755)
        variables = {**os.environ, **setting.environment}
        own = Path(directory) / setting.environment.get("TMPDIR", "tmp")
        own.mkdir()
        own.chmod(0o777)
        variables["TMPDIR"] = str(own)
        if setting.what == SETTINGS["turkish"].what:
            command = ["localedef", "-i", "tr_TR", "-f", "UTF-8", f"{directory}/tr_TR.UTF-8"]
            subprocess.run(command, check=True)
            variables["LOCPATH"] = directory
        yield variables


def run(setting: Setting) -> str:
    """Run the tests under a setting. Returns its row of the table; "" if they did not begin."""
    paths = [f"tests/{folder}" for folder in setting.folders]
    command = [sys.executable, "-m", "tests.harness.run", "-n", "auto", "--dist", "worksteal"]
    command += ["-m", "not slow and not gpu", "-q", "--durations=0", *setting.arguments, *paths]
    with ExitStack() as stack:
        variables = stack.enter_context(places(setting))
        for words in setting.beside:
            beside = stack.enter_context(subprocess.Popen(words))
            stack.callback(beside.kill)
        done = subprocess.run(
            [*setting.prefix, *command], cwd=ROOT, env=variables, capture_output=True, text=True
        )
    log = ROOT / "build" / "anywhere" / f"{name_of(setting)}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    counts = dict.fromkeys(("passed", "failed", "skipped", "error"), 0)
    for line in done.stdout.splitlines():
        if re.search(r" in [\d.]+s", line):
            counts |= {what: int(count) for count, what in COUNTS.findall(line)}
    if not counts["passed"]:
        print(f"{setting.what}: the tests did not begin, see {log}", file=sys.stderr)
        return ""
    left = done.stdout.count("left behind: ")
    failed = counts["failed"] + counts["error"] + left
    day = date.today().isoformat()
    return (
        f"| {setting.what} | {counts['passed']:,} | {failed} | {counts['skipped']} "
        f"| {processor()}, {day} |"
    )


def name_of(setting: Setting) -> str:
    """Return the name by which a setting is chosen."""
    return next(name for name, each in SETTINGS.items() if each is setting)


def processor() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def why_not(setting: Setting) -> str:
    """Return what a setting lacks on this machine; "" if nothing."""
    words = [*setting.prefix[:1], *(["localedef"] if "tr_TR" in setting.what else [])]
    missing = [word for word in words if shutil.which(word) is None]
    if missing:
        return f"there is no {missing[0]}"
    return "only root can make it" if setting.needs_root and os.geteuid() else ""


def write_row(row: str) -> None:
    """Print a row, and put it into the table in place of the former one of its setting."""
    print(row, flush=True)
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    head = row.split("|")[1]
    rows = [line for line in table.strip().splitlines() if line.split("|")[1] != head]
    text = "\n".join([*rows, row])
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main(names: Sequence[str]) -> int:
    """Run the settings, all of them if none is named."""
    unknown = set(names) - SETTINGS.keys()
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}. There are: {', '.join(SETTINGS)}")
        return 2
    for name in names or SETTINGS:
        if reason := why_not(SETTINGS[name]):
            print(f"{name}: {reason}")
        else:
            if row := run(SETTINGS[name]):
                write_row(row)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
