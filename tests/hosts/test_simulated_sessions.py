"""The lease and the epochs, by simulated runs with faults. A seed that fails fails again."""

from __future__ import annotations

import pytest
from simulated_hosts import Simulation

from shoal.launch.hosts.agent_session import MOST_PENDING_OUTPUT, AgentSession
from shoal.launch.hosts.driver_session import DriverSession, HostEvent

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
    driver, agent = DriverSession(1, 6.0), AgentSession(0.0)
    driver.connected(0, 0.0)
    exchange(driver, agent, 0.0)
    agent.hello({"torch": "2.13.0"}, 0.0)
    exchange(driver, agent, 0.0)
    driver.start({0: {}}, 0.0)
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
    assert driver.tick(8.0) == [HostEvent(0, {"do": "lost", "reason": "no word for 8.0 s"})]
    assert driver.clear_at_s(0) == 8.0


def test_an_agent_whose_connection_ends_ends_itself() -> None:
    _, agent = connected()
    end = END | {"reason": "the connection to the driver has ended"}
    assert agent.received(b"", 1.0) == [end]


@pytest.mark.parametrize(
    "line",
    [
        *(b'{"do": "dance"}\n', b'{"do": "end"}\n', b'{"do": "start"}\n'),
        b'{"do": "spec", "lease_s": 1}\n',
    ],
)
def test_an_agent_ends_itself_after_a_message_that_no_driver_sends(line: bytes) -> None:
    _, agent = connected()
    assert agent.received(line, 1.0)[0].items() > END.items()


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
        event.message for event in exchange(driver, agent, 0.5) if event.message["do"] != "lost"
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
