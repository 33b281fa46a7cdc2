"""Lists of hosts."""

import pytest
from cli_calls import shoal
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.launch.hosts.ssh_hosts import SshHost, parse_hosts


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
        parse_hosts("a,-oProxyCommand=touch x,b:0,fd00::1,a:3,c d,user@,,[x]:2,e:two,$(reboot)")
    lines = str(caught.value).splitlines()
    assert [line.strip() for line in lines[1:]] == [
        "--hosts: a host cannot begin with '-': -oProxyCommand=touch x",
        "--hosts: b:0: the number of ranks must be 1 to 10000",
        "--hosts: write an IPv6 address in brackets: [fd00::1] or [fd00::1]:2",
        "--hosts: a is named twice. Name it once, with the sum",
        "--hosts: c d has a character that no name of a host has",
        "--hosts: a host without a name. Write HOST or HOST:RANKS",
        "--hosts: a host without a name. Write HOST or HOST:RANKS",
        "--hosts: [x] is no IPv6 address",
        "--hosts: e:two: the number of ranks must be 1 to 10000",
        "--hosts: $(reboot) has a character that no name of a host has",
    ]


def test_a_list_without_a_host_is_refused():
    with pytest.raises(UsageError, match="host without a name"):
        parse_hosts("")


def test_a_hostfile_is_refused_with_the_list_to_give(capsys: pytest.CaptureFixture[str]):
    status, _, err = shoal(capsys, "launch", "--hostfile", "hosts.txt", "train.py")
    assert status == 2
    assert "--hostfile: name the hosts themselves: --hosts a:2,b:2. Of a file" in err
    assert '--hosts "$(paste -sd, FILE)"' in err


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
