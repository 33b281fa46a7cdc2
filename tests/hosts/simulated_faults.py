"""The faults that a simulated run meets: connections, processes, and one clock."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulated_hosts import Simulation

LAST_WORDS = "done\n"
FAULTS = (
    *("cut", "hold", "hold", "slow", "slow", "slow_then_silent", "slow_then_silent"),
    *("stop_driver", "stop_agent", "stop_agent", "kill_agent", "end_rank", "finish_ranks"),
)
"""Names of functions here, as often as they are to be drawn."""


def meet_fault(simulation: Simulation) -> None:
    """Let one fault happen, drawn by chance."""
    globals()[simulation.random.choice(FAULTS)](simulation)


def cut(simulation: Simulation) -> None:
    """Cut a connection. Either end may be told by a reset."""
    if (agent := simulation.an_agent()) is None:
        return
    agent.is_cut = True
    agent.to_driver.held_until_s = agent.to_agent.held_until_s = inf
    away_s = simulation.random.choice([0.0, simulation.random.uniform(0, 20)])
    simulation.reachable_from_s[agent.host] = simulation.now_s + away_s
    if simulation.random.random() < 0.5:
        simulation.at(simulation.now_s + 0.1, lambda: simulation.arrives_at_driver(agent, b""))
    if simulation.random.random() < 0.2:
        simulation.at(simulation.now_s + 0.1, lambda: simulation.arrives_at_agent(agent, b""))


def hold(simulation: Simulation) -> None:
    """Hold back what is sent in one direction; it arrives late, and all at once."""
    if (agent := simulation.an_agent()) is not None:
        direction = simulation.random.choice([agent.to_driver, agent.to_agent])
        direction.held_until_s = simulation.now_s + simulation.random.uniform(0, 25)


def slow(simulation: Simulation) -> None:
    """Delay each message in one direction by seconds."""
    if (agent := simulation.an_agent()) is not None:
        direction = simulation.random.choice([agent.to_driver, agent.to_agent, agent.to_agent])
        direction.slow_until_s = simulation.now_s + simulation.random.uniform(0, 15)


def slow_then_silent(simulation: Simulation) -> None:
    """Delay answers to an agent, and a little later hold back what it sends."""
    if (agent := simulation.an_agent()) is not None:
        agent.to_agent.slow_until_s = simulation.now_s + simulation.random.uniform(5, 15)
        until_s = simulation.now_s + simulation.random.uniform(15, 40)

        def silence() -> None:
            agent.to_driver.held_until_s = max(agent.to_driver.held_until_s, until_s)

        simulation.at(simulation.now_s + simulation.random.uniform(1, 4), silence)


def stop_driver(simulation: Simulation) -> None:
    """Stop the driver's process; with its machine, its clock stands still too."""
    until_s = simulation.now_s + simulation.random.uniform(0, 9)
    begin_s = max(simulation.now_s, simulation.driver_stopped_until_s)
    # A second stop within a first one ends neither it nor the rest of its clock.
    simulation.driver_stopped_until_s = max(simulation.driver_stopped_until_s, until_s)
    if simulation.random.random() < 0.3:
        simulation.driver_lag_s += max(0.0, until_s - begin_s)


def stop_agent(simulation: Simulation) -> None:
    if (agent := simulation.an_agent()) is not None:
        agent.stopped_until_s = simulation.now_s + simulation.random.uniform(0, 20)


def kill_agent(simulation: Simulation) -> None:
    if (agent := simulation.an_agent()) is not None:
        simulation.agent_ends(agent)


def end_rank(simulation: Simulation) -> None:
    agent = simulation.an_agent()
    if agent is not None and agent.epoch:
        agent.session.ended(0, -9)
        simulation.agent_sends(agent)


def finish_ranks(simulation: Simulation) -> None:
    """End all ranks of a host, after more output than the driver takes at once."""
    agent = simulation.an_agent()
    if agent is not None and agent.epoch and simulation.now_s >= agent.stopped_until_s:
        agent.epoch = 0
        for _ in range(40):
            agent.session.output(0, "stdout", "x" * 7_999 + "\n")
        agent.session.output(0, "stdout", LAST_WORDS)
        agent.session.ended(0, 0)
        simulation.agent_sends(agent)
