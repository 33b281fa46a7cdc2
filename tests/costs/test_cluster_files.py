"""Cluster files: hosts, links as a tree, and all problems in one error."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.costs import cluster
from shoal.errors import ConfigError

TWO_HOSTS = """
hosts:
  a: {ranks: 4, memory: 16GiB, inside: {bandwidth: 100GB/s}, link: {bandwidth: 400Mbit/s}}
  b: {ranks: 4, memory: 16GiB, inside: {bandwidth: 100GB/s}, link: {bandwidth: 400Mbit/s}}
mtbf: 1000h
"""


def load(tmp_path: Path, text: str) -> cluster.Cluster:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return cluster.load(file)


def test_quantities_have_units() -> None:
    assert cluster.read_size("16GiB") == 16 * 2**30
    assert cluster.read_size("5KB") == cluster.read_size("5kB") == 5_000
    assert cluster.read_size("16 GB") == 16e9
    assert cluster.read_rate("400 Mbit/s") == 50e6
    assert cluster.read_rate("50GB/s") == 50e9
    assert cluster.read_time("5us") == pytest.approx(5e-6)
    assert cluster.read_time("3h") == 10800.0


@pytest.mark.parametrize("text", ["-1GB", "many", "0", "4", "nan", "1 elephant"])
def test_a_quantity_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be greater than 0|is not a number|without a unit"):
        cluster.read_size(text)


def test_a_group_inside_a_host_uses_its_inner_link(tmp_path: Path) -> None:
    found = load(tmp_path, TWO_HOSTS)
    assert found.ranks == 8
    assert found.mtbf_s == 3.6e6
    assert found.link_of(4, 1).bandwidth == 100e9


def test_a_range_names_as_many_hosts(tmp_path: Path) -> None:
    text = "hosts:\n  n[08-10].x: {ranks: 4, memory: 16GiB}\n  login: {ranks: 1}\n"
    found = load(tmp_path, text)
    assert [host.name for host in found.hosts] == ["n08.x", "n09.x", "n10.x", "login"]
    assert found.ranks == 13
    with pytest.raises(ConfigError) as error:
        load(tmp_path, "hosts:\n  n[1-3]: {ranks: -1}\n  m[3-1]: {ranks: 1}\n")
    assert len(error.value.problems) == 2, "one for each entry"


def test_a_host_without_ranks_is_one_of_servers(tmp_path: Path) -> None:
    workers = "a: {ranks: 4, link: {bandwidth: 8MB/s}}"
    text = f"hosts:\n  {workers}\n  s: {{ranks: 0, link: {{bandwidth: 6MB/s}}}}\n"
    found = load(tmp_path, text)
    assert (found.ranks, [host.name for host in found.server_hosts]) == (4, ["s"])
    assert found.server_rates(1) == (2e6, 6e6)
    assert found.server_rates(3) == (2e6, 2e6), "servers of one host share its link"
    with pytest.raises(ConfigError, match="no host has ranks"):
        load(tmp_path, "hosts: {s: {ranks: 0}}")


def test_groups_that_leave_a_host_together_share_its_link(tmp_path: Path) -> None:
    found = load(tmp_path, TWO_HOSTS)
    assert found.link_of(8, 1).bandwidth == 50e6
    # Four groups of two, one rank of each on either host.
    assert found.link_of(2, 4).bandwidth == 50e6 / 4


def test_all_problems_of_a_file_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(
            tmp_path,
            """
hosts:
  a: {ranks: -1, memori: 1GiB, link: {bandwidth: -3GB/s}}
  b: {ranks: 2, link: {bandwidth: 1GB/s, to: nowhere}}
colour: red
""",
        )
    text = str(error.value)
    for problem in (
        "hosts.a.ranks: -1 is not a whole number, 0 or above",
        "hosts.a.memori: is not known; did you mean 'memory'?",
        "hosts.a.link.bandwidth: -3GB must be greater than 0",
        "its way leads to 'nowhere', which is no switch",
        "colour: is not known",
    ):
        assert problem in text


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in a circle: one -> two -> one"):
        load(
            tmp_path,
            """
hosts: {a: {ranks: 1, link: {bandwidth: 1GB/s, to: one}}}
switches: {one: {bandwidth: 1GB/s, to: two}, two: {bandwidth: 1GB/s, to: one}}
""",
        )


def test_a_file_without_hosts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name at least one host"):
        load(tmp_path, "- 1")


def test_a_file_that_is_no_yaml_or_not_there_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.yaml: while parsing"):
        load(tmp_path, "hosts: {a: [")
    with pytest.raises(ConfigError, match=r"none\.yaml: .*No such file"):
        cluster.load(tmp_path / "none.yaml")


def test_entries_of_another_form_are_told_with_what_belongs_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, "hosts: {a: 8, b: {inside: fast}, c: {link: {latency: 5us}}, 'd[4-1]': {}}")
    for problem in (
        "hosts.a: give ranks, memory, inside and link",
        "hosts.b.inside: give bandwidth, latency and to",
        "hosts.c.link.bandwidth: is missing, as in 50GB/s or 400Mbit/s",
        "hosts.d[4-1]: this range has no host",
    ):
        assert problem in str(error.value)


def test_hosts_below_one_switch_share_its_way_up_where_a_group_leaves_it(tmp_path: Path) -> None:
    text = """
hosts:
  a[1-2]: {ranks: 2, link: {bandwidth: 100MB/s, latency: 1us, to: rack}}
  b: {ranks: 2, link: {bandwidth: 100MB/s, latency: 1us, to: other}}
switches: {rack: {bandwidth: 50MB/s, latency: 4us, to: core}, other: {}, core: {}}
"""
    link = load(tmp_path, text).link_of(6, 1)
    assert (link.bandwidth, link.latency_s) == (50e6, pytest.approx(5e-6))
    one_rack = text.replace(
        "  b: {ranks: 2, link: {bandwidth: 100MB/s, latency: 1us, to: other}}\n", ""
    )
    assert load(tmp_path, one_rack).link_of(4, 1).bandwidth == 100e6
