"""`shoal train` on hosts that have IPv6 addresses alone: ranks and parameter servers meet there."""

from __future__ import annotations

from pathlib import Path

import pytest
from namespaces import Hosts, needs_hosts
from test_real_runs import ended
from tiny_jobs import MLP, metrics, tiny

from shoal.config import to_yaml

pytestmark = [pytest.mark.slow, needs_hosts]


@pytest.mark.parametrize("strategy", ["ddp", "server=2,replicas=2"])
def test_ranks_and_servers_meet_over_ipv6(tmp_path: Path, strategy: str) -> None:
    with Hosts(tmp_path, 2, network="v6", names="none") as hosts:
        job = tiny(hosts.shared / "run", MLP, strategy=strategy)
        (hosts.shared / "job.yaml").write_text(to_yaml(job))
        (hosts.shared / "keys").mkdir(mode=0o700)
        words = ["--hosts", "node1,node2", "--env", f"SHOAL_SERVER_DIRECTORY={hosts.shared}/keys"]
        code, _, stderr = ended(hosts, "train", "job.yaml", *words)
        assert code == 0, stderr
        assert max(record["step"] for record in metrics(hosts.shared / "run")) == 12
        assert hosts.leftovers() == {}
