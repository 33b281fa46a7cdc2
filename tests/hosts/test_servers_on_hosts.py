"""Parameter servers on several hosts: a run that goes on without a host that is lost for good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hosts_command import ROOT, HostsCommand, hosts_command, kill
from tiny_jobs import MLP, metrics, tiny

from shoal.config import to_yaml
from tests.harness.waiting import until

pytestmark = pytest.mark.slow

VARIABLES = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/train'}", "SHOAL_HOSTS_LEASE": "3"}


def write_job(folder: Path, **more: Any) -> str:
    job = tiny(folder / "run", MLP, checkpoint__every_epochs=2, log__every=1, **more)
    (folder / "job.yaml").write_text(to_yaml(job))
    return str(folder / "job.yaml")


def has_saved(folder: Path, command: HostsCommand) -> bool:
    assert command.process.poll() is None
    return any((folder / "run/checkpoints").glob("step-*[0-9]/manifest.json"))  # in place


@pytest.mark.parametrize("strategy", ["server=2", "server=2,replicas=2", "server=2,staleness=2"])
@pytest.mark.parametrize("lost", ["a", "c"])
def test_a_run_with_servers_goes_on_without_a_host(
    tmp_path: Path, strategy: str, lost: str
) -> None:
    job = write_job(tmp_path, strategy=strategy, train__epochs=40)
    words = ["train", job, "--hosts", "a,b,c", "--min-hosts", "2"]
    with hosts_command(tmp_path, *words, FAKE_SSH_DOWN=str(tmp_path), **VARIABLES) as command:
        until(lambda: has_saved(tmp_path, command))
        (tmp_path / lost).touch()
        kill([command.agent(lost)])
        code, _, stderr = command.end()
        assert command.others() == []
    assert code == 0, stderr
    assert f"note: the run goes on without {lost}" in stderr
    assert "2 processes start from the checkpoint of step" in stderr
    last = max(record["step"] for record in metrics(tmp_path / "run"))
    assert last > 40
