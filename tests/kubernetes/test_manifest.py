"""The manifest of docs/clusters.md fits JobSet's schema, and its command makes one world."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_calls import shoal
from schema_walk import problems

SCHEMA = json.loads(Path(__file__).with_name("jobset_schema.json").read_text())["schema"]
PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
SCRIPT = """\
import os, sys
from shoal.launch.environment import read
info = read(os.environ)
line = f'{info.rank} {info.world} {info.local_rank} {info.local_world} {sys.argv[1:]}'
os.write(1, f'rank {line}\\n'.encode())  # in one piece: all ranks write into one pipe
"""


@pytest.fixture
def manifest() -> dict[str, Any]:
    section = PAGE.partition("\n## Kubernetes\n")[2].partition("\n## ")[0]
    text = section.partition("```yaml\n")[2].partition("```")[0]
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def job_of(manifest: dict[str, Any]) -> dict[str, Any]:
    job: dict[str, Any] = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = job_of(manifest)["template"]["spec"]["containers"][0]
    return container


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_the_manifest_has_only_what_its_schema_knows(manifest: dict[str, Any]) -> None:
    assert list(problems(SCHEMA, manifest)) == []


def test_the_walk_finds_what_a_server_would_refuse(manifest: dict[str, Any]) -> None:
    job_of(manifest)["paralelism"] = 2
    job_of(manifest)["completions"] = "2"
    manifest["spec"]["failurePolicy"]["rules"][0]["action"] = "Restart"
    del container_of(manifest)["name"]
    found = "\n".join(problems(SCHEMA, manifest))
    for part in ("paralelism is unknown", "'2' is no integer", "'Restart' is none", "name is miss"):
        assert part in found


def test_the_parts_of_the_manifest_fit_together(manifest: dict[str, Any]) -> None:
    job = job_of(manifest)
    container = container_of(manifest)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in job["template"]["spec"]["volumes"]}
    (replicated,) = manifest["spec"]["replicatedJobs"]
    rule = manifest["spec"]["failurePolicy"]["rules"][0]
    assert rule["targetReplicatedJobs"] == [replicated["name"]]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    # <jobset>-<job>-<replica>-<pod>.<jobset>, the name that the headless service gives.
    name = manifest["metadata"]["name"]
    assert variables["MASTER_ADDR"] == f"{name}-{replicated['name']}-0-0.{name}"
    assert job["completions"] == job["parallelism"]
    words = container["command"][-1]
    assert f"--nnodes {job['completions']} " in words
    assert f"--nproc-per-node {container['resources']['limits']['nvidia.com/gpu']} " in words


@pytest.mark.slow
def test_the_commands_of_two_pods_make_one_world(manifest: dict[str, Any], tmp_path: Path) -> None:
    container = container_of(manifest)
    (tmp_path / "ranks.py").write_text(SCRIPT)
    *shell, words = container["command"]
    for pattern, smaller in (
        (r"--nnodes \d+", "--nnodes 2"),
        (r"--nproc-per-node \d+", "--nproc-per-node 2"),
        (r"--master-port \d+", f"--master-port {free_port()}"),
        (r"-m shoal train", "ranks.py train"),
    ):
        words, count = re.subn(pattern, smaller, words)
        assert count == 1, pattern
    # Only a cluster knows the first pod's name: it is that of this machine's loopback here.
    environment = {**os.environ, "MASTER_ADDR": "localhost", "TMPDIR": str(tmp_path)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    pods = [
        subprocess.Popen(
            [*shell, words],
            cwd=tmp_path,
            env={**environment, "JOB_COMPLETION_INDEX": str(pod)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for pod in range(2)
    ]
    try:
        outputs = [pod.communicate(timeout=120) for pod in pods]
    finally:
        for pod in pods:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pod.pid, signal.SIGKILL)  # its ranks too
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    lines = [line for out, _ in outputs for line in out.splitlines() if line.startswith("rank ")]
    given = ["train", "digits", "--out", "runs/digits"]
    assert sorted(lines) == [f"rank {rank} 4 {rank % 2} 2 {given}" for rank in range(4)]


@pytest.mark.parametrize(
    "words",
    [
        ("launch", "--kubernetes", "--image", "i", "train.py"),
        ("train", "digits", "--image", "i", "--kubernetes", "--nodes", 2),
    ],
)
def test_a_flag_for_kubernetes_names_the_page(
    words: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = shoal(capsys, *words)
    assert status == 2
    assert "docs/clusters.md#kubernetes" in err
    assert err.count("\n") == 1
