"""Lists of hosts and hostfiles."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.launch.hosts.ssh_hosts import SshHost, parse_hosts, read_hostfile


def test_a_list_has_names_users_addresses_and_numbers_of_ranks():
    assert parse_hosts("a:2, user@b:3,[fd00::1]:4,c,me@[fd00::2],10.0.0.1:1") == [
        SshHost("a", 2),
        SshHost("user@b", 3),
        SshHost("fd00::1", 4),
        SshHost("c", None),
        SshHost("me@fd00::2", None),
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


def test_a_hostfile_of_windows_with_comments_blanks_and_a_byte_order_mark_is_read(tmp_path: Path):
    file = tmp_path / "hosts"
    text = "\ufeff# ours\r\n a slots=2  \r\n\r\nme@b:3 # the other\r\n[fd00::1]:1\t\r\nc"
    file.write_bytes(text.encode())
    assert read_hostfile(file) == [
        SshHost("a", 2),
        SshHost("me@b", 3),
        SshHost("fd00::1", 1),
        SshHost("c", None),
    ]


def test_problems_of_a_hostfile_are_told_with_their_lines(tmp_path: Path):
    file = tmp_path / "hosts"
    file.write_text("a\nb slots=x\nc max_slots=2\n\na\n")
    with pytest.raises(UsageError) as caught:
        read_hostfile(file)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        f"{file}:2: b:x: the number of ranks must be 1 to 10000",
        f"{file}:3: c max_slots=2 has a character that no name of a host has",
        f"{file}:5: a is named twice. Name it once, with the sum",
    ]
    file.write_text("# nothing\n")
    with pytest.raises(UsageError, match="no host in it"):
        read_hostfile(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_hostfile(file)
    with pytest.raises(UsageError, match="No such file"):
        read_hostfile(tmp_path / "absent")


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
