"""Bugs of the lease and of the epochs, planted into sessions and into the bodies around them.

Each takes a MonkeyPatch and plants itself. The simulation must find every one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import pytest
import simulated_faults
from simulated_hosts import Agent, Simulation

from shoal.launch.hosts.agent_protocol import LeaseTimes
from shoal.launch.hosts.agent_session import AgentSession
from shoal.launch.hosts.driver_session import DriverSession, HostState

Plant = Callable[[pytest.MonkeyPatch], None]


def _answer(patch: pytest.MonkeyPatch, lease_until_s: Callable[[AgentSession, Any], float]) -> None:
    """Let the answer to a heartbeat set the end of the lease."""
    take = AgentSession._on_message

    def on_message(session: AgentSession, message: Any) -> Any:
        if message["do"] == "ok":
            session.lease_until_s = lease_until_s(session, message["at"])
            return []
        return take(session, message)

    patch.setattr(AgentSession, "_on_message", on_message)


def lease_from_the_receipt_of_the_answer(patch: pytest.MonkeyPatch) -> None:
    receive = AgentSession.received

    def received(session: AgentSession, data: bytes, now_s: float) -> Any:
        orders = receive(session, data, now_s)
        if b'"ok"' in data and session.lease_until_s < inf:
            session.lease_until_s = now_s + session.times.lease_s
        return orders

    patch.setattr(AgentSession, "received", received)


def lease_from_the_newest_heartbeat(patch: pytest.MonkeyPatch) -> None:
    _answer(
        patch,
        lambda session, at: (
            session._next_beat_s - session.times.heartbeat_s + session.times.lease_s
        ),
    )


def lease_is_not_renewed(patch: pytest.MonkeyPatch) -> None:
    _answer(patch, lambda session, at: session.lease_until_s)


def lease_by_a_clock_of_another_host(patch: pytest.MonkeyPatch) -> None:
    _answer(patch, lambda session, at: 1e7 + at)


def lease_begins_with_the_marker(patch: pytest.MonkeyPatch) -> None:
    def hello(session: AgentSession, facts: Any, now_s: float) -> None:
        session._next_beat_s = now_s
        session.tell("hello", facts=facts)

    patch.setattr(AgentSession, "hello", hello)


def the_timer_is_not_set(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Simulation, "set_timer", lambda simulation, agent: None)


def agent_lives_on_without_a_connection(patch: pytest.MonkeyPatch) -> None:
    receive = AgentSession.received
    patch.setattr(
        AgentSession,
        "received",
        lambda session, data, now_s: receive(session, data, now_s) if data else [],
    )


def agent_forgets_its_ranks(patch: pytest.MonkeyPatch) -> None:
    def kill_ranks(simulation: Simulation, agent: Agent) -> None:
        simulation.at(simulation.now_s + simulation.kill_s(), partial(setattr, agent, "epoch", 0))
        agent.session.stopped()

    patch.setattr(Simulation, "kill_ranks", kill_ranks)


def agent_tells_the_end_before_the_output(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        AgentSession,
        "ended",
        lambda session, rank, code: session.tell("ended", rank=rank, code=code),
    )


def driver_forgets_the_time_of_killing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseTimes, "lost_s", property(lambda times: times.lease_s))


def driver_takes_the_end_of_a_connection_for_the_end_of_ranks(patch: pytest.MonkeyPatch) -> None:
    disconnect = DriverSession.disconnected

    def disconnected(driver: DriverSession, host: int, reason: str) -> Any:
        driver.states[host].may_run = False
        return disconnect(driver, host, reason)

    patch.setattr(DriverSession, "disconnected", disconnected)


def driver_does_not_hear_heartbeats(patch: pytest.MonkeyPatch) -> None:
    take = DriverSession._on_message

    def on_message(driver: DriverSession, host: int, message: Any, now_s: float) -> Any:
        if message["do"] == "beat":
            driver.send(host, "ok", at=message["at"])
            return []
        return take(driver, host, message, now_s)

    patch.setattr(DriverSession, "_on_message", on_message)


def driver_does_not_kill_the_ranks_of_other_hosts(patch: pytest.MonkeyPatch) -> None:
    kill = DriverSession.kill
    patch.setattr(
        DriverSession, "kill", lambda driver, host: kill(driver, host) if host == 0 else None
    )


def driver_hears_agents_that_it_has_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Simulation, "is_current", lambda simulation, agent: True)


def driver_forgets_a_host_that_connects_again(patch: pytest.MonkeyPatch) -> None:
    def connected(driver: DriverSession, host: int, now_s: float) -> None:
        driver.states[host] = HostState(is_connected=True, heard_s=now_s)
        times = {"lease_s": driver.times.lease_s, "kill_s": driver.times.kill_s}
        driver.send(host, "spec", **times)

    def decide(simulation: Simulation) -> None:
        for host, agent in enumerate(simulation.current):
            if agent is None and not simulation.is_connecting[host]:
                simulation.connect(host)
        original(simulation)

    original = Simulation.decide
    patch.setattr(DriverSession, "connected", connected)
    patch.setattr(Simulation, "decide", decide)


def a_second_driver_starts_beside_the_first(patch: pytest.MonkeyPatch) -> None:
    """The command is killed and given again; the second driver does not know of the first."""

    def stop_driver(simulation: Simulation) -> None:
        driver = DriverSession(len(simulation.current), simulation.driver.times)
        for host in range(len(simulation.current)):
            simulation.close(host)
        simulation.driver, simulation.is_stopping = driver, True

    patch.setattr(simulated_faults, "stop_driver", stop_driver)


PLANTED: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        lease_from_the_receipt_of_the_answer,
        lease_from_the_newest_heartbeat,
        lease_is_not_renewed,
        lease_by_a_clock_of_another_host,
        lease_begins_with_the_marker,
        the_timer_is_not_set,
        agent_lives_on_without_a_connection,
        agent_forgets_its_ranks,
        agent_tells_the_end_before_the_output,
        driver_forgets_the_time_of_killing,
        driver_takes_the_end_of_a_connection_for_the_end_of_ranks,
        driver_does_not_hear_heartbeats,
        driver_does_not_kill_the_ranks_of_other_hosts,
        driver_hears_agents_that_it_has_given_up,
        driver_forgets_a_host_that_connects_again,
        a_second_driver_starts_beside_the_first,
    )
}
