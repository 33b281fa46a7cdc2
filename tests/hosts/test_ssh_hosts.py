"""Lists of hosts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.launch.hosts.ssh_client import SshHost, parse_hosts


def test_a_list_has_names_users_addresses_and_numbers_of_ranks():
    assert parse_hosts("a:2, user@b:3,[fd00::1]:4,c,me@[fd00::2],10.0.0.1:1") == [
        SshHost("a", 2),
        SshHost("user@b", 3),
        SshHost("fd00::1", 4),
        SshHost("c", 1),
        SshHost("me@fd00::2", 1),
        SshHost("10.0.0.1", 1),
    ]


def test_all_problems_of_a_list_are_told_at_once():
    with pytest.raises(UsageError) as caught:
        parse_hosts(
            "a,-oProxyCommand=touch x,b:0,fd00::1,a:3,c d,user@,,[x]:2,e:two,$(x),[fe80::1%$(x)]"
        )
    lines = str(caught.value).splitlines()
    assert [line.strip().partition(". ")[0] for line in lines[1:]] == [
        "--hosts: '-oProxyCommand=touch x' is no host",
        "--hosts: 'b:0' is no host",
        "--hosts: 'fd00::1' is no host",
        "--hosts: a is named twice",
        "--hosts: 'c d' is no host",
        "--hosts: 'user@' is no host",
        "--hosts: '' is no host",
        "--hosts: '[x]:2' is no host",
        "--hosts: 'e:two' is no host",
        "--hosts: '$(x)' is no host",
        "--hosts: '[fe80::1%$(x)]' is no host",
    ]


def test_a_list_without_a_host_is_refused():
    with pytest.raises(UsageError, match="'' is no host"):
        parse_hosts("")


@settings(max_examples=30)
@given(st.text(max_size=30))
def test_any_text_is_a_list_of_hosts_or_refused(text: str):
    try:
        hosts = parse_hosts(text)
    except UsageError:
        return
    assert hosts
    assert all(host.name and not host.name.startswith("-") for host in hosts)
    assert parse_hosts(",".join(str(host) for host in hosts)) == hosts
