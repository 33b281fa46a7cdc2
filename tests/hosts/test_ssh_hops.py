"""The limit of clients that start at one ssh server at a time, also behind a jump host."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shoal.launch.hosts import ssh_hops
from shoal.launch.hosts.ssh_hops import MOST_OF_HOP, first_hop, first_hops, may_start

CONFIG = """
Host a b
  ProxyJump user@jump:2222,second
Host c
  HostName 10.0.0.3
  Port 2200
Host d
  ProxyCommand nc -X connect %h %p
"""


def started(hops: dict[int, str]) -> list[int]:
    """Return the hosts that may start before any of them has started."""
    starting: list[int] = []
    for host in hops:
        if may_start(host, starting, hops):
            starting.append(host)
    return starting


def test_hosts_behind_one_jump_host_start_eight_at_a_time_and_others_beside_them() -> None:
    hops = dict.fromkeys(range(20), "jump j") | {20: "jump k", 21: "10.0.0.1 22"}
    assert started(hops) == [*range(MOST_OF_HOP), 20, 21]


@pytest.mark.parametrize(("cores", "most"), [(1, 8), (2, 16), (4, 32), (64, 32)])
def test_hosts_of_their_own_servers_start_together_up_to_a_limit_by_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, most: int
) -> None:
    monkeypatch.setattr(ssh_hops, "usable_cores", lambda: cores)
    assert len(started({host: f"10.0.0.{host} 22" for host in range(100)})) == most


def test_hosts_whose_server_is_not_known_count_as_behind_one() -> None:
    assert len(started(dict.fromkeys(range(100), first_hop("")))) == MOST_OF_HOP


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh client")
def test_the_client_says_which_server_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    config.write_text(CONFIG)
    monkeypatch.setenv("SHOAL_SSH", f"ssh -F {config}")
    a, b, c, d, e = first_hops(["a", "b", "c", "d", "me@10.0.0.5"])
    assert a == b == "jump user@jump:2222"
    assert c == "10.0.0.3 2200"
    assert d.startswith("command nc")
    assert e == "10.0.0.5 22"


def test_a_client_without_settings_leaves_the_server_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_SSH", "/no/such/ssh")
    assert first_hops(["a"]) == [""]
