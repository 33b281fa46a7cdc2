"""Facts about a host, and what their comparison says."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import shoal
from shoal.launch.hosts import host_facts
from shoal.launch.hosts.host_facts import FactsRequest, HostFacts, collect_facts
from shoal.launch.hosts.ssh_client import SshHost

REQUEST = FactsRequest("/home/me/digits", "train.py", "runs/digits")
FACTS = HostFacts(
    shoal="1.0",
    source="3fa1" * 4,
    python="3.11.2",
    torch="2.13.0+cpu",
    hostname="node1",
    identity="boot net pid",
    can_write=True,
    cwd_exists=True,
    script_digest="77",
    addresses=["10.0.0.1"],
    ssh_address="10.0.0.1",
)


def host(name: str, processes: int = 1, **changes) -> tuple[SshHost, HostFacts]:
    """Return a host that differs from FACTS in its identity and in `changes`."""
    changes = {"identity": name, "hostname": name, **changes}
    return SshHost(name, processes), dataclasses.replace(FACTS, **changes)


def test_facts_of_this_host_are_true_and_need_no_torch(tmp_path: Path):
    (tmp_path / "train.py").write_text("print(1)\n")
    program = (
        "import json, sys\nfrom dataclasses import asdict\n"
        "from shoal.launch.hosts.host_facts import FactsRequest, collect_facts\n"
        "request = FactsRequest(**json.loads(sys.stdin.read()))\n"
        "print(json.dumps(asdict(collect_facts(request))))\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    request = FactsRequest(str(tmp_path), "train.py", "runs/digits")
    environ = {**os.environ, "SSH_CONNECTION": "10.0.0.9 5000 10.0.0.1 22"}
    printed = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(dataclasses.asdict(request)),
        capture_output=True,
        text=True,
        check=True,
        env=environ,
    )
    facts = HostFacts.from_json(json.loads(printed.stdout))
    assert facts.shoal == shoal.__version__
    assert facts.hostname == socket.gethostname()
    assert facts.torch == metadata.version("torch")
    assert facts.cwd_exists
    assert facts.can_write
    assert facts.script_digest is not None
    assert facts.ssh_address == "10.0.0.1"
    here = collect_facts(request)
    assert facts.identity == here.identity
    assert facts.source == here.source
    assert host_facts.problems([(SshHost("a", 1), facts)], request, here) == []


def test_a_host_that_has_none_of_it_is_told_so(tmp_path: Path):
    facts = collect_facts(FactsRequest(str(tmp_path / "absent"), "train.py", None))
    assert not facts.cwd_exists
    assert facts.script_digest is None


def test_hosts_may_be_several_on_one_machine(monkeypatch):
    monkeypatch.setenv("SHOAL_HOST", "node7")
    assert collect_facts(FactsRequest("/")).identity == "node7"


def test_facts_are_read_from_json():
    document = json.loads(json.dumps(dataclasses.asdict(FACTS)))
    assert HostFacts.from_json({**document, "later": 1}) == FACTS
    assert HostFacts.from_json({**document, "torch": None}).torch is None
    del document["hostname"]
    with pytest.raises(KeyError, match="hostname"):
        HostFacts.from_json(document)


def test_equal_hosts_have_no_problems():
    hosts = [host("a"), host("b"), host("c", torch="2.13.0+cu130")]
    assert host_facts.problems(hosts, REQUEST, FACTS) == []


def test_every_problem_of_every_host_is_in_one_list():
    hosts = [
        host("a"),
        host("b", torch="2.12.1", python="3.12.1"),
        host("c", source="9bc2" * 4, script_digest="78", can_write=False),
        host("d", 3, identity="a"),
        host("e", cwd_exists=False, script_digest=None, torch=None),
        host("f", script_digest=None),
    ]
    assert host_facts.problems(hosts, REQUEST, FACTS) == [
        "host d is host a (d): name it once, a:4",
        "host c: you cannot write to the run directory runs/digits",
        "host e: torch is not installed for its Python. Give --python, or install it",
        "host e: there is no directory /home/me/digits that you can enter. Make it there",
        "host f: train.py cannot be read in /home/me/digits. Copy it there",
        "host b has Python 3.12.1, a has 3.11.2. Give --python",
        "host b has torch 2.12.1, a has 2.13.0+cpu",
        "host c has another Shoal (1.0, source 9bc29bc2; here it is 1.0, source 3fa13fa1). "
        "Install the same there",
        "host c: train.py is not the file of this machine. Copy it there",
    ]
