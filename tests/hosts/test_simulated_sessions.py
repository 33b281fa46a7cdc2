"""The lease and the epochs, by simulated runs with faults. A seed that fails fails again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from simulated_hosts import Simulation

from shoal.launch.failure import Failure
from shoal.launch.hosts.agent_protocol import MAX_LINE_BYTES, LeaseTimes, clock_s
from shoal.launch.hosts.agent_session import MOST_PENDING_OUTPUT, AgentSession
from shoal.launch.hosts.driver_session import DriverSession, HostLost, HostSpoke
from shoal.launch.hosts.host_connections import HostConnections
from shoal.launch.hosts.remote_ranks import HostRanks, RemoteRanks
from shoal.launch.hosts.ssh_hosts import SshHost

TIMES = LeaseTimes(6.0, 2.0)
END = {"do": "end"}


def problems(seeds: range) -> dict[int, list[str]]:
    found = {seed: Simulation(seed).run() for seed in seeds}
    return {seed: lines[:3] for seed, lines in found.items() if lines}


def test_no_ranks_of_two_epochs_live_together_and_every_run_runs_again() -> None:
    assert problems(range(8)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1_000, 21_000, 1_000))
def test_no_ranks_of_two_epochs_live_together_in_20_000_runs(first: int) -> None:
    assert problems(range(first, first + 1_000)) == {}


def test_the_simulated_runs_do_restart() -> None:
    simulation = Simulation(3)
    assert simulation.run() == []
    assert len(simulation.starts_s) > 1


def exchange(driver: DriverSession, agent: AgentSession, now_s: float) -> list:
    """Carry all that both have to send, and return the events."""
    events, orders = [], []
    while (up := agent.to_send()) or (down := driver.to_send(0)):
        if up:
            events += driver.received(0, up, now_s)
        else:
            orders += agent.received(down, now_s)
    return [*events, *orders]


def connected() -> tuple[DriverSession, AgentSession]:
    driver, agent = DriverSession(1, TIMES), AgentSession(0.0)
    driver.connected(0, 0.0)
    exchange(driver, agent, 0.0)
    agent.hello({"torch": "2.13.0"}, 0.0)
    exchange(driver, agent, 0.0)
    driver.start([(0, {})], 0.0)
    exchange(driver, agent, 0.0)
    return driver, agent


def test_the_lease_counts_from_the_sending_of_the_heartbeat() -> None:
    driver, agent = connected()
    agent.tick(3.0)
    beat = agent.to_send()
    driver.received(0, beat, 8.0)
    assert agent.received(driver.to_send(0), 8.5) == []
    assert agent.lease_until_s == 9.0  # 3 + 6, however late the answer came
    assert agent.tick(9.0) == [END | {"reason": "the driver was silent for too long"}]


def test_a_host_without_heartbeats_is_lost_and_clear_after_its_lease() -> None:
    driver, _ = connected()
    assert driver.due_s == 8.0
    assert driver.tick(7.9) == []
    assert driver.tick(8.0) == [HostLost(0, "no word for 8.0 s")]
    assert driver.clear_at_s(0) == 8.0


def test_an_agent_whose_connection_ends_ends_itself() -> None:
    _, agent = connected()
    end = END | {"reason": "the connection to the driver has ended"}
    assert agent.received(b"", 1.0) == [end]


@pytest.mark.parametrize(
    "line",
    [
        *(b"{]\n", b'{"do": "dance"}\n', b'{"do": "ok"}\n', b"7\n", b'{"do": "end"}\n'),
        *(b'{"do": "start"}\n', b'{"do": "spec", "lease_s": 1, "kill_s": 1}\n'),
    ],
)
def test_an_agent_ends_itself_after_a_message_that_no_driver_sends(line: bytes) -> None:
    _, agent = connected()
    assert agent.received(line, 1.0)[0].items() > END.items()


@pytest.mark.parametrize(
    "line",
    [
        *(b"{]\n", b"x" * (MAX_LINE_BYTES + 1), b'{"do": "beat"}\n', b"7\n"),
    ],
)
def test_an_agent_that_sends_nonsense_counts_as_lost(line: bytes) -> None:
    driver, _ = connected()
    assert isinstance(driver.received(0, line, 1.0)[0], HostLost)


@pytest.mark.parametrize(
    "message",
    [
        *({"do": "out"}, {"do": "out", "rank": "first", "stream": "stdout", "text": ""}),
        *({"do": "answer"}, {"do": "answer", "number": []}, {"do": "dropped", "lines": {}}),
    ],
)
def test_a_host_is_lost_with_a_message_without_its_fields(message: dict) -> None:
    connections = HostConnections([SshHost("a", 1)], "python", {})
    connections.session.connected(0, clock_s())
    connections._receive = lambda: [HostSpoke(0, message)]  # type: ignore[method-assign]
    (lost,) = connections.pump(0.0)
    assert isinstance(lost, HostLost)
    assert "malformed" in lost.reason


@pytest.mark.parametrize("do", ["ended", "failed"])
@pytest.mark.parametrize("rank", [1, 2, -1, None])
def test_an_agent_that_tells_of_a_rank_of_another_host_counts_as_lost(do: str, rank: int) -> None:
    connections = SimpleNamespace(session=None, name=str, drop=lambda host: "")
    ranks = RemoteRanks(
        connections,  # type: ignore[arg-type]
        [HostRanks(0, 0, 1), HostRanks(1, 1, 1)],
    )
    (failure,) = ranks._rank_events(HostSpoke(0, {"do": do, "rank": rank, "code": 0}))
    assert isinstance(failure, Failure)
    assert (failure.rank, failure.is_loss) == (0, True)
    assert [rank.number for rank in ranks.alive] == [1]


def test_heartbeats_overtake_the_output_that_waits() -> None:
    _, agent = connected()
    for _ in range(100):
        agent.output(0, "stdout", "x" * 8_000 + "\n")
    agent.tick(1.5)
    assert b'"beat"' in agent.to_send()
    assert b'"out"' in agent.to_send()


def test_output_that_the_connection_does_not_take_is_dropped_and_counted() -> None:
    driver, agent = connected()
    lines = MOST_PENDING_OUTPUT // 1_000 + 500
    for _ in range(lines):
        agent.output(0, "stdout", "x" * 999 + "\n")
    agent.ended(0, 0)
    messages = [
        event.message for event in exchange(driver, agent, 0.5) if isinstance(event, HostSpoke)
    ]
    printed = sum(message["text"].count("\n") for message in messages if message["do"] == "out")
    dropped = sum(message["lines"] for message in messages if message["do"] == "dropped")
    assert dropped > 0
    assert printed + dropped == lines
    assert messages[-1]["do"] == "ended"


def test_text_that_is_no_unicode_arrives() -> None:
    driver, agent = connected()
    agent.output(0, "stderr", "caf\udce9\n")
    texts = [event.message["text"] for event in exchange(driver, agent, 0.5)]
    assert texts == ["caf\udce9\n"]
