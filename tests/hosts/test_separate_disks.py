"""Hosts that share no disk: namespaces with a disk each are refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from desk_command import ended
from hosts_command import ROOT
from namespaces import Hosts, needs_hosts
from tiny_jobs import MLP, tiny

from shoal.config import to_yaml

pytestmark = [pytest.mark.slow, needs_hosts]

RUN = "/mnt/run"  # on every host a directory of its own


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts"), 2) as hosts:
        yield hosts


@pytest.mark.parametrize("strategy", ["ddp", "server=1"])
def test_hosts_without_a_shared_disk_are_refused_before_the_start(
    hosts: Hosts, strategy: str
) -> None:
    job = hosts.shared / "job.yaml"
    job.write_text(to_yaml(tiny(Path(RUN), MLP, strategy=strategy)))
    words = ["train", str(job), "--hosts", "node1,node2"]
    code, _, stderr = ended(hosts, *words, PYTHONPATH=f"{ROOT}:{ROOT / 'tests/train'}")
    assert code == 2, stderr
    assert f"--out {RUN}: rank 1 does not see the directory of rank 0" in stderr
    assert "All hosts must share it: choose one on a file system that all mount" in stderr
    assert hosts.leftovers() == {}
