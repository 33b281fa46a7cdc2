"""`--kubernetes`: the JobSet fits the schema, kubectl gets it, and its pods' commands run."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_calls import shoal
from schema_walk import problems
from tiny_jobs import MLP, assert_equal_to_the_bit, everything, tiny

from shoal.config import to_yaml

SCHEMA = json.loads(Path(__file__).with_name("jobset_schema.json").read_text())["schema"]
FULL = (
    *("--kubernetes", "--nodes", 2, "--ntasks-per-node", 2, "--image", "registry/me/image:1"),
    *("--namespace", "team", "--workdir", "/work", "--cpus-per-task", 3, "--limit", "memory=8Gi"),
    *("--limit", "nvidia.com/gpu=2", "--claim", "runs:/data/runs", "--strategy", "zero3"),
)


@pytest.fixture
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rendered(capsys: pytest.CaptureFixture[str], verb: str, *words: object) -> dict[str, Any]:
    status, out, err = shoal(capsys, verb, "--dry-run", *words)
    assert status == 0, err
    manifest: dict[str, Any] = yaml.safe_load(out)
    return manifest


def dry_run(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """The JobSet of `launch` for a script `my script.py`."""
    Path("my script.py").touch()
    return rendered(capsys, "launch", *words, "my script.py", "--epochs", 3)


def job_of(manifest: dict[str, Any]) -> dict[str, Any]:
    job: dict[str, Any] = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = job_of(manifest)["template"]["spec"]["containers"][0]
    return container


class Pods:
    """The pods of a JobSet as processes of this machine, with the variables of Kubernetes.

    The first pod's name, which only a cluster knows, is that of this machine's loopback.
    """

    def __init__(self, manifest: dict[str, Any], port: int) -> None:
        container = container_of(manifest)
        variables = {entry["name"]: entry["value"] for entry in container["env"]}
        assert variables["MASTER_ADDR"].startswith(manifest["metadata"]["name"])
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        command = [sys.executable, *container["command"][1:]]
        self.processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **variables, "JOB_COMPLETION_INDEX": str(pod)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for pod in range(job_of(manifest)["completions"])
        ]

    def ends(self) -> tuple[list[int], str, str]:
        """Exit codes, stdout and stderr of all pods."""
        try:
            outputs = [process.communicate(timeout=120) for process in self.processes]
        finally:
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        codes = [process.returncode for process in self.processes]
        return codes, "".join(out for out, _ in outputs), "".join(err for _, err in outputs)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_the_jobset_has_only_what_its_schema_knows(
    in_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = dry_run(capsys, *FULL)
    assert list(problems(SCHEMA, manifest)) == []
    assert list(problems(SCHEMA, dry_run(capsys, "--kubernetes", "--image", "i"))) == []
    train = (
        "train",
        "digits",
        "--kubernetes",
        "--image",
        "i",
        "--requeues",
        0,
        "--train.epochs",
        3,
    )
    of_train = rendered(capsys, *train)
    assert list(problems(SCHEMA, of_train)) == []
    assert (
        container_of(of_train)["command"][-6:]
        == [*("--", "-m", "shoal", "train", "digits", "--train.epochs", "3")][-6:]
    )


def test_the_walk_finds_what_a_server_would_refuse(
    in_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = dry_run(capsys, *FULL)
    wrong = copy.deepcopy(manifest)
    job_of(wrong)["paralelism"] = 2
    job_of(wrong)["completions"] = "2"
    wrong["spec"]["failurePolicy"]["rules"][0]["action"] = "Restart"
    del container_of(wrong)["name"]
    found = "\n".join(problems(SCHEMA, wrong))
    for part in ("paralelism is unknown", "'2' is no integer", "'Restart' is none", "name is miss"):
        assert part in found


def test_the_parts_of_the_jobset_fit_together(
    in_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = dry_run(capsys, *FULL)
    pod = job_of(manifest)["template"]["spec"]
    container = container_of(manifest)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    codes = job_of(manifest)["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert codes["containerName"] == container["name"]
    (job,) = manifest["spec"]["replicatedJobs"]
    assert manifest["spec"]["failurePolicy"]["rules"][0]["targetReplicatedJobs"] == [job["name"]]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    # <jobset>-<job>-<replica>-<pod>.<jobset>, the name that the headless service gives.
    assert variables["MASTER_ADDR"] == f"my-script-{job['name']}-0-0.my-script"
    assert variables["SHOAL_STRATEGY"] == "zero3"
    limits = container["resources"]["limits"]
    assert limits == {"cpu": "6", "memory": "8Gi", "nvidia.com/gpu": "2"}


def test_a_jobset_has_no_secret_no_variable_of_the_shell_and_no_right_on_its_node(
    in_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "5dd0c7b8a1")
    text = json.dumps(dry_run(capsys, *FULL)).lower()
    assert '"mountpath": "/data/runs"' in text
    for word in ("5dd0c7b8a1", "my_token", "secret", "hostnetwork", "hostport", "hostpath"):
        assert word not in text
    assert "privileged" not in text
    assert "securitycontext" not in text
    assert '"automountserviceaccounttoken": false' in text


def test_the_commands_of_all_pods_make_one_world(
    in_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = dry_run(
        *(capsys, "--kubernetes", "--image", "i", "--nodes", 2, "--ntasks-per-node", 2),
        *("--output", "all"),
    )
    Path("my script.py").write_text(
        "import os, sys\n"
        "from shoal.launch.environment import read\n"
        "info = read(os.environ)\n"
        "line = f'{info.launcher} {info.rank} {info.world} {info.local_rank} {info.local_world} '\n"
        # In one piece: all ranks write into one pipe.
        "os.write(1, f'{line}{sys.argv}\\n'.encode())\n"
    )
    codes, out, err = Pods(manifest, 29_400).ends()
    assert codes == [0, 0], err
    words = ["my script.py", "--epochs", "3"]
    expected = [f"environment {rank} 4 {rank % 2} 2 {words}" for rank in range(4)]
    assert sorted(out.splitlines()) == expected


def test_a_pod_ends_with_the_code_of_the_rank_that_failed_and_with_75_if_all_have_saved(
    in_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = dry_run(capsys, "--kubernetes", "--image", "i", "--ntasks-per-node", 2)
    script = Path("my script.py")
    script.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(9)\ntime.sleep(100)\n"
    )
    assert Pods(manifest, 29_400).ends()[0] == [9]
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "pathlib.Path(f'up-{time.time_ns()}').touch()\n"
        "time.sleep(100)\n"
    )
    pods = Pods(manifest, 29_400)
    wait_for_files(in_directory, "up-*", 2)
    pods.processes[0].send_signal(signal.SIGTERM)
    assert pods.ends()[0] == [75]


def wait_for_files(directory: Path, pattern: str, count: int) -> None:
    limit = time.monotonic() + 100
    while len(list(directory.glob(pattern))) < count:
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_a_pod_without_its_number_says_so(
    in_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.launch.kubernetes import pod

    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    assert pod.main(["--pods", "2", "--ranks", "1", "--", "x.py"]) == 2
    assert "completionMode: Indexed" in capsys.readouterr().err


def test_kubectl_gets_the_jobset_and_the_user_the_next_commands(
    in_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_kubectl(in_directory, monkeypatch, 'cat > got; echo "$@" > words')
    manifest = dry_run(capsys, *FULL)
    status, _, err = shoal(capsys, "launch", *FULL, "my script.py", "--epochs", 3)
    assert status == 0, err
    assert yaml.safe_load(Path("got").read_text()) == manifest
    assert Path("words").read_text() == "create -f -\n"
    assert "kubectl logs -n team -f -l jobset.sigs.k8s.io/jobset-name=my-script," in err
    assert "kubectl delete jobset my-script -n team" in err


@pytest.mark.parametrize(
    ("said", "cure"),
    [
        ("Error from server (AlreadyExists): x", "kubectl delete jobset my-script"),
        ('no matches for kind "JobSet"', "The cluster needs the JobSet controller"),
    ],
)
def test_what_kubectl_refuses_is_said_in_one_line_with_the_cure(
    in_directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    cure: str,
) -> None:
    with_kubectl(in_directory, monkeypatch, f"echo '{said}' >&2; exit 1")
    Path("my script.py").touch()
    status, _, err = shoal(capsys, "launch", "--kubernetes", "--image", "i", "my script.py")
    assert status == 2
    assert f"shoal: kubectl refused the JobSet: {said}" in err
    assert cure in err
    assert err.count("\n") == 1


def with_kubectl(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    (folder / "commands").mkdir()
    command = folder / "commands" / "kubectl"
    command.write_text(f"#!/bin/sh\n{body}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'commands'}{os.pathsep}{os.environ['PATH']}")


def test_all_that_is_wrong_is_said_at_once(
    in_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(in_directory))
    words = ("--kubernetes", "--gres", "gpu:1", "--job-name", "A_b", "--limit", "gpu", "--nodes", 0)
    more = ("--claim", "runs", "--workdir", "here", "--namespace", "x y", "missing.py")
    status, _, err = shoal(capsys, "launch", *words, *more)
    assert status == 2
    for part in (
        "--gres: not with --kubernetes",
        "--nodes: 0 must be",
        "--job-name 'A_b'",
        "--namespace 'x y'",
        "--image ''",
        "--limit gpu: NAME=QUANTITY",
        "--claim runs: NAME:DIR",
        "--workdir here: begin with /",
        "there is no script missing.py",
        "there is no kubectl on the PATH",
    ):
        assert part in err, err


@pytest.mark.slow
def test_pods_that_are_stopped_and_started_again_end_with_the_undisturbed_weights(
    in_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patient = {**MLP, "data.name": "patient"}
    runs = {}
    for name, path in (("undisturbed", ""), ("stopped", str(in_directory))):
        config = Path(f"{name}.yaml")
        more = {"data__path": path} if path else {}
        config.write_text(to_yaml(tiny(in_directory / name, patient, **more)))
        words = ("--kubernetes", "--image", "i", "--nodes", 2)
        runs[name] = rendered(capsys, "train", config, *words)
    assert Pods(runs["undisturbed"], free_port()).ends()[0] == [0, 0]
    pods = Pods(runs["stopped"], free_port())
    wait_for_files(in_directory, "waiting.*", 2)
    for process in pods.processes:
        process.send_signal(signal.SIGTERM)
    codes, _, err = pods.ends()
    assert codes == [75, 75], err
    codes, _, err = Pods(runs["stopped"], free_port()).ends()
    assert codes == [0, 0], err
    assert "resumed from" in err
    assert_equal_to_the_bit(
        everything(in_directory / "stopped"), everything(in_directory / "undisturbed")
    )
