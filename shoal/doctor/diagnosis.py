"""`shoal doctor`: the facts of this machine, its problems, and what can be used on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from shoal.doctor import machine_info
from shoal.platform.optional_packages import EXTRAS
from shoal.platform.quantity_text import bytes_text
from shoal.platform.torch_versions import NEWEST, OLDEST, minor_version, untested

PIP_TORCH = f'pip install "torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"'
TORCHVISION_BEHIND = 15  # torchvision 0.26 belongs to torch 2.11, 0.27 to 2.12, and so on
NEWEST_TORCHVISION = 29  # 0.29.1 and later belong to every torch from 2.14 on
LITTLE_SHARED_MEMORY_BYTES = 128 * 2**20
FEW_OPEN_FILES = 1024
WIDTH = 96
RANKS = "several ranks"
ONLY_HERE = " for shoal train; not for a script of your own"


@dataclass(frozen=True)
class Problem:
    """A problem of this machine, and its cure."""

    fact: str
    cure: str


@dataclass(frozen=True)
class Diagnosis:
    """Readiness of a feature. If it is not ready, `remark` names the missing piece
    and the cure."""

    ready: bool
    remark: str = ""


@dataclass(frozen=True)
class Report:
    """All results of an examination.

    Args:
        facts: section -> name -> value; plain data, units in the names.
        problems: to be solved, whichever strategy is used.
        features: name -> verdict.
    """

    facts: Mapping[str, Mapping[str, Any]]
    problems: tuple[Problem, ...]
    features: Mapping[str, Diagnosis]

    @property
    def exit_code(self) -> int:
        """Return 0 where ranks can add up numbers on this machine's CPU, else 1."""
        return 0 if self.features[RANKS].ready else 1


def examine() -> Report:
    """Examine this machine. It takes seconds: torch is imported, and two ranks communicate."""
    return assess(machine_info.collect())


def assess(facts: Mapping[str, Mapping[str, Any]]) -> Report:
    """Return the report on these facts."""
    problems = (*_version_problems(facts["software"]), *_machine_problems(facts))
    return Report(facts, problems, _features(facts))


def render(report: Report) -> str:
    """Return the report as text of at most 96 columns."""
    blocks = [_table(section, _rows(facts)) for section, facts in report.facts.items()]
    features = [
        (name, "ready" + verdict.remark if verdict.ready else f"missing: {verdict.remark}")
        for name, verdict in report.features.items()
    ]
    blocks.append(_table("features", features))
    problems = [row for p in report.problems for row in (("problem", p.fact), ("cure", p.cure))]
    blocks.append(_table("problems", problems) if problems else "no problems found")
    return "\n\n".join(blocks)


def _version_problems(software: Mapping[str, Any]) -> list[Problem]:
    torch = software["torch"]
    torchvision = software["torchvision"]
    if torch is None:
        return [Problem("torch is not installed", PIP_TORCH)]
    problems = []
    if note := untested(torch):
        problems.append(Problem(note, PIP_TORCH))
    expected_minor = min(minor_version(torch)[1] + TORCHVISION_BEHIND, NEWEST_TORCHVISION)
    is_other = torchvision is not None and minor_version(torchvision) != (0, expected_minor)
    pip_torchvision = f'pip install "torchvision==0.{expected_minor}.*"'
    if is_other:
        fact = f"torchvision {torchvision} does not belong to torch {torch}"
        problems.append(Problem(fact, pip_torchvision))
    for package, error in software["plain_import_errors"].items():
        fact = f"`import {package}` fails in a script of your own: {error}"
        problems.append(Problem(fact, _cure_of_import(error, is_other, pip_torchvision)))
    return problems


def _cure_of_import(error: str, is_other: bool, pip_torchvision: str) -> str:
    """Return what to install where a package is there, and cannot be imported."""
    if "torchvision" in error:
        if is_other:
            return pip_torchvision
        return "both from one index: pip install --force-reinstall torch torchvision"
    return "install it again, in the version that its error asks for"


def _machine_problems(facts: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    machine = facts["machine"]
    conflict = facts["launch"]["conflict"]
    problems = []
    shared_bytes = machine["shared_memory_bytes"]
    if shared_bytes is not None and shared_bytes < LITTLE_SHARED_MEMORY_BYTES:
        fact = (
            f"/dev/shm has {bytes_text(shared_bytes)}, too little for data-loader workers, "
            "which would die of SIGBUS"
        )
        problems.append(
            Problem(
                fact, "docker run --shm-size=2g (or --ipc=host), or train with --data.workers 0"
            )
        )
    if machine["open_files"] < FEW_OPEN_FILES:
        fact = (
            f"a process may open {machine['open_files']} files, which many ranks or workers exceed"
        )
        problems.append(Problem(fact, "ulimit -n 4096"))
    if conflict:
        problems.append(
            Problem(conflict.rstrip("."), "unset the variables that do not belong to this launcher")
        )
    return problems


def _features(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Diagnosis]:
    software = facts["software"]
    errors = software["plain_import_errors"]
    missing = {  # what is missing and the cure; "" where a feature is ready
        RANKS: _ranks(facts),
        "torchvision models": software["torchvision_error"] or "",
        "timm models": _imported("timm", software),
        "transformers": _imported("transformers", software),
        "plots": _extra("matplotlib", software),
        "TensorBoard": _extra("tensorboard", software),
        "servers: TLS": ""
        if software["cryptography"]
        else "pip install 'shoal[tls]' (between machines; else encrypt=false)",
        "GPUs": _gpus(facts["devices"]),
        "NCCL": ""
        if "nccl" in facts["communication"]["backends"]
        else "no GPU build of torch; needed on GPUs only",
        "torch.compile": _compile(software),
    }
    only_here = {
        "torchvision models": "torchvision" in errors,
        "timm models": _is_mended("timm", software),
    }
    return {
        name: Diagnosis(not text, text or ONLY_HERE * only_here.get(name, False))
        for name, text in missing.items()
    }


def _ranks(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Judge by two ranks that have added up two numbers on this machine."""
    communication = facts["communication"]
    if facts["software"]["torch"] is None:
        return f"torch; {PIP_TORCH}"
    if "gloo" not in communication["backends"]:
        return "the gloo backend; this build of torch has none, take pytorch.org's"
    if not communication["all_reduce_error"]:
        return ""
    last_line = communication["all_reduce_error"].splitlines()[-1]
    return f"two ranks could not add up two numbers: {last_line} (all of it: shoal doctor --json)"


def _imported(package: str, software: Mapping[str, Any]) -> str:
    """Judge a package of an extra, which a script of the user's imports by itself."""
    failed = package in software["plain_import_errors"] and software[package] is not None
    if failed and not _is_mended(package, software):
        return f"a {package} that can be imported; see the problems"
    return _extra(package, software)


def _is_mended(package: str, software: Mapping[str, Any]) -> bool:
    """Return True for timm where only the torchvision fails that a script imports.

    `shoal train` imports torchvision before timm, in a way of its own.
    """
    error = software["plain_import_errors"].get(package, "")
    return package == "timm" and "torchvision" in error and not software["torchvision_error"]


def _gpus(devices: Mapping[str, Any]) -> str:
    if devices["gpus"]:
        return ""
    if devices.get("cuda_build"):
        return "none is visible; see what nvidia-smi and CUDA_VISIBLE_DEVICES say"
    return (
        "torch is a CPU build; with an NVIDIA driver, plain `pip install torch` takes the CUDA "
        "build"
    )


def _compile(software: Mapping[str, Any]) -> str:
    if not software["compiler"]:
        return "a C++ compiler; apt install g++"
    return "" if software["python_headers"] else "Python.h; apt install python3-dev"


def _extra(package: str, software: Mapping[str, Any]) -> str:
    return "" if software[package] else f"pip install 'shoal[{EXTRAS[package][0]}]'"


def _rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    shown_below = ("_error", "_errors", "conflict")  # among the verdicts and the problems
    optional = ("_limit", "_limit_bytes", "_build", "_s")  # left out where there is none
    rows = []
    for key, value in facts.items():
        if key == "gpus" and value:
            rows += [(f"gpu {index}", _text(key, gpu)) for index, gpu in enumerate(value)]
        elif not key.endswith(shown_below) and (value is not None or not key.endswith(optional)):
            rows.append((_label(key), _text(key, value)))
    return rows


def _label(key: str) -> str:
    return key.removesuffix("_bytes").removesuffix("_s").replace("_", " ")


def _text(key: str, value: Any) -> str:
    if value is None:
        return "not there"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, dict):
        size = bytes_text(value["memory_bytes"])
        return f"{value['name']} ({size}, capability {value['capability']})"
    if key.endswith("_bytes"):
        return bytes_text(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value} s" if key.endswith("_s") else str(value)


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    width = max(len(label) for label, _ in rows) + 2
    lines = [title]
    for label, text in rows:
        # Do not break names such as python3-dev: users copy them.
        first, *rest = wrap(text, WIDTH - width - 2, break_on_hyphens=False) or [""]
        lines += [f"  {label:<{width}}{first}", *(" " * (width + 2) + line for line in rest)]
    return "\n".join(lines)
