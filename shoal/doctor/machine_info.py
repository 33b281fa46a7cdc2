"""Facts about this machine as plain data, which `shoal doctor` judges. Names end in the unit.

torch is imported inside functions only. An unknown fact is None.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.errors import ShoalError
from shoal.platform.cgroups import cgroup_limits, usable_cores

Facts = dict[str, Any]
RANKS_LIMIT_S = 90
PLAINLY_IMPORTED = ("torchvision", "timm", "transformers")
"""Packages that scripts of users import by themselves."""


def collect() -> dict[str, Facts]:
    """Return all sections of facts. It takes seconds: torch is imported, and two ranks
    communicate.
    """
    return {
        "software": software(),
        "machine": machine(),
        "devices": devices(),
        "communication": communication(),
        "launch": launch(),
    }


def software() -> Facts:
    """Return versions; None for a package that is not installed."""
    packages = (
        *("torch", "torchvision", "numpy", "timm", "transformers", "matplotlib", "tensorboard"),
        "cryptography",
    )
    return {
        "python": platform.python_version(),
        "shoal": __version__,
        **{package: _version(package) for package in packages},
        "torchvision_error": _torchvision_error(),
        "plain_import_errors": _plain_import_errors(),
        "compiler": shutil.which(os.environ.get("CXX", ""))
        or shutil.which("g++")
        or shutil.which("clang++"),
        "python_headers": Path(sysconfig.get_path("include"), "Python.h").is_file(),
    }


def machine() -> Facts:
    """Return cores, memory and limits, the limits of the container included."""
    cores_limit, memory_limit_bytes = cgroup_limits()
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "cores_usable": usable_cores(),
        "cores_limit": cores_limit,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_limit_bytes": memory_limit_bytes,
        "shared_memory_bytes": shared.total if shared else None,
        "shared_memory_free_bytes": shared.free if shared else None,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "fork": "ranks are forked from one server"
        if sys.platform == "linux"
        else "every rank is a new interpreter",
    }


def devices() -> Facts:
    """Return GPUs and the CPU's capabilities; without torch, only an empty list of GPUs."""
    try:
        import torch
    except (ImportError, OSError):
        return {"gpus": []}
    return {
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "cuda_build": torch.version.cuda,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def communication() -> Facts:
    """Return torch.distributed's backends, and the error of an all-reduce of two ranks here."""
    return {
        "backends": _backends(),
        "compiled_all_reduce": _compiled(),
        **_all_reduce(),
    }


def launch() -> Facts:
    """Return the launcher of this process, by its environment, and the launchers on this
    machine.
    """
    from shoal.launch import environment

    try:
        rank_info = environment.read(os.environ)
        decision = {"launcher": rank_info.launcher, "reason": rank_info.reason, "conflict": None}
    except ShoalError as error:
        decision = {"launcher": None, "reason": None, "conflict": str(error)}
    return {**decision, **{program: shutil.which(program) for program in ("srun", "mpirun", "ssh")}}


def check_ranks() -> int:
    """Start two ranks that add up two numbers. Call it from the main thread.

    Returns: the exit code of the ranks, as of `RestartingRun.run`.
    """
    from shoal.launch.restarting import RestartingRun, Work

    work = Work("shoal.doctor.machine_info:add_up", (), torch_store=True)
    return RestartingRun(work, 2).run()


def add_up() -> None:
    """Add up two numbers. Both of two ranks call this.

    Raises:
        RuntimeError: the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="env://")
    rank = dist.get_rank()
    total = torch.full((2,), rank + 1.0)
    dist.all_reduce(total)
    if total.tolist() != [3.0, 3.0]:
        raise RuntimeError(f"rank {rank} got {total.tolist()} instead of [3.0, 3.0]")


def _all_reduce() -> Facts:
    program = f"from {__name__} import check_ranks; raise SystemExit(check_ranks())"
    begin = time.monotonic()
    error = None
    try:
        # A separate process: even if it crashes or hangs, the report goes on.
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=RANKS_LIMIT_S,
            check=False,
        )
        if done.returncode != 0:
            error = done.stderr.strip() or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        error = f"no result after {RANKS_LIMIT_S} s"
    seconds = None if error else round(time.monotonic() - begin, 1)
    return {"all_reduce_error": error, "first_all_reduce_of_two_new_ranks_s": seconds}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torchvision_error() -> str | None:
    try:
        from shoal.platform.torchvision_import import torchvision  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _plain_import_errors() -> dict[str, str]:
    """Return the errors of packages that are installed and that a script cannot import.

    Shoal's own import of torchvision works where a plain one fails, so other interpreters try it.
    """
    installed = [package for package in PLAINLY_IMPORTED if _version(package) is not None]
    command = (sys.executable, "-c", "import importlib, sys; importlib.import_module(sys.argv[1])")
    tries = {
        package: subprocess.Popen(
            (*command, package), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for package in installed
    }
    told = {package: (tried.communicate()[1], tried.returncode) for package, tried in tries.items()}
    return {
        package: (text.strip().splitlines() or [f"status {code}"])[-1]
        for package, (text, code) in told.items()
        if code != 0
    }


def _gpu(index: int) -> Facts:
    import torch

    properties = torch.cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    return {
        "name": properties.name,
        "capability": capability,
        "memory_bytes": properties.total_memory,
    }


def _backends() -> list[str]:
    try:
        import torch.distributed as dist
    except (ImportError, OSError):
        return []
    if not dist.is_available():
        return []
    return [
        name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()
    ]


def _compiled() -> bool | None:
    """Return True where all-reduces in shared memory use compiled code; None without torch."""
    try:
        from shoal.shm_backend import native
    except (ImportError, OSError):
        return None
    return native.version() > 0
