"""Steps on parameter servers that read weights beside the model's call, or are left out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_step import QUIET, Net, assert_same, loader, penalised, some, twice
from torch import Tensor

import shoal
from shoal.errors import UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn

SERVERS = "server=2,part_mb=0.0001"
LATE_S = 0.15


def penalty_first(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """A penalty on all weights, which are read before any layer runs."""
    penalty = sum((p.abs().sum() for p in net.parameters()), torch.zeros(()))
    return F.cross_entropy(net(x), y) + 0.01 * penalty


def functional(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Weights of units and of the head in functions, in lists, and by `.data`; no model call."""
    weights: Any = [block.weight for block in net.blocks]
    norms = torch.stack(torch._foreach_norm(weights))
    hidden = F.linear(net.encode(x), weights[1].T, bias=net.stem.bias.data)
    return F.cross_entropy(hidden @ net.head.weight.T, y) + norms.sum().detach() * 1e-3


STEPS = (twice, penalty_first, functional, some, penalised)


def prepared(strategy: str) -> tuple[shoal.Run, Net, torch.optim.SGD, Any]:
    torch.manual_seed(0)
    run, net = shoal.init(strategy, **QUIET), Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    return run, *run.prepare(net, optimizer, loader())


def make_late(run: shoal.Run) -> None:
    """Let requests of steps leave late, so that new values come late."""
    if run.remote is None:
        return
    client: Any = run.remote.client  # type: ignore[attr-defined]
    network, request_step = client._network, client.request_step
    send: Callable[[Any], None] = network.carry_out

    def send_late(actions: Any) -> None:
        actions = [*actions]

        def later() -> None:
            with client.lock:
                send(actions)

        threading.Timer(LATE_S, later).start()

    def late_step(order: Any) -> None:
        client.wait(range(len(client.parts)))
        network.carry_out = send_late
        request_step(order)
        network.carry_out = send

    client.request_step = late_step


def trained(strategy: str) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """Return losses and weights for each kind of step."""
    results = {}
    for step in STEPS:
        run, net, optimizer, batches = prepared(strategy)
        make_late(run)
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            losses.append(run.forward_backward(partial(step, net), x, y).item())
            optimizer.step()
        results[step.__name__] = losses, run.weights()
    return results


@pytest.mark.slow
def test_a_step_reads_the_newest_weights_wherever_it_reads_them() -> None:
    expected = trained("single")
    for found in world.run(2, trained, SERVERS):
        for name, (losses, weights) in expected.items():
            assert found[name][0] == pytest.approx(losses, rel=1e-10), name
            assert_same(found[name][1], weights, name)


def leaves_out(strategy: str, when: str) -> dict[str, Tensor]:
    """Train without the second of the steps, whose gradients are dropped before or after, where
    weights may be written then; or drop those of every step just before it.
    """
    run, net, optimizer, batches = prepared(strategy)
    for index, (x, y) in enumerate(batches):
        if when == "before":
            optimizer.zero_grad()
        run.forward_backward(partial(twice, net), x, y)
        if when == "always":
            optimizer.zero_grad()
        if index != 1 or when == "always":
            optimizer.step()
        if when in ("after", "edited"):
            optimizer.zero_grad()
        if when == "edited":
            with run.edit(), torch.no_grad():
                net.head.bias.mul_(0.5)
    return run.weights()


@pytest.mark.parametrize(
    ("when", "strategy"),
    [
        ("before", SERVERS),
        ("edited", SERVERS),
        pytest.param("after", f"{SERVERS},replicas=2", marks=pytest.mark.slow),
        pytest.param("always", SERVERS, marks=pytest.mark.slow),
    ],
)
def test_steps_may_be_left_out_by_zero_grad(when: str, strategy: str) -> None:
    expected = leaves_out("single", when)
    for found in world.run(2, leaves_out, strategy, when):
        assert_same(found, expected)


def takes_some(strategy: str) -> dict[str, Tensor]:
    """Remove gradients of a part of the model, by the module and by hand, then clip the others."""
    run, net, optimizer, batches = prepared(strategy)
    for index, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        run.forward_backward(partial(twice, net), x, y)
        if index == 1:
            net.blocks.zero_grad()
        net.head.bias.grad = None
        run.clip_gradients(0.5)
        assert (run.gradients()["head.bias"]) is None
        optimizer.step()
    return run.weights()


def test_a_gradient_that_is_removed_is_not_stepped() -> None:
    expected = takes_some("single")
    for found in world.run(2, takes_some, f"{SERVERS},replicas=2"):
        assert_same(found, expected)


def writes(change: str) -> str:
    run, net, optimizer, batches = prepared(SERVERS)
    run.forward_backward(partial(twice, net), *next(iter(batches)))
    if change == "zero":
        net.head.zero_grad(set_to_none=False)
    else:
        net.head.weight.grad = torch.ones_like(net.head.weight)
    with pytest.raises(UsageError) as error:
        optimizer.step()
    return str(error.value)


def test_a_gradient_that_is_zeroed_or_replaced_is_refused_with_a_cure() -> None:
    (errors,) = world.run(1, in_turn, writes, ("zero",), ("replace",))
    for error in errors:
        assert "the gradient of head.weight is on the servers" in error
        assert "set its .grad to None" in error


def takes_turns(strategy: str) -> dict[str, Tensor]:
    """Train one layer or another, with gradients that are set to zero. Some never have one."""
    run, net, optimizer, batches = prepared(strategy)
    for index, (x, y) in enumerate(batches):
        optimizer.zero_grad(set_to_none=False)
        loss = of_head if index % 2 else of_stem
        run.forward_backward(partial(loss, net), x, y)
        optimizer.step()
    return run.weights()


def of_stem(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net.stem(x), y)


def of_head(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net.head(F.pad(x, (0, 1))), y)


def test_a_gradient_of_zeros_is_stepped_where_a_pass_gives_no_other() -> None:
    expected = takes_turns("single")
    for found in world.run(2, takes_turns, SERVERS):
        assert_same(found, expected)


def adds_up() -> str:
    run, net, _, batches = prepared(SERVERS)
    x, y = next(iter(batches))
    run.forward_backward(partial(twice, net), x, y)
    with pytest.raises(UsageError) as error:
        run.forward_backward(partial(twice, net), x, y)
    return str(error.value)


def test_gradients_of_two_calls_are_not_added_up_in_silence() -> None:
    (said,) = world.run(1, adds_up)
    assert "use accumulate" in said
    assert "to leave a step out call optimizer.zero_grad()" in said


def unzeroed(strategy: str, steps: int) -> None:
    """Train without ever zeroing gradients."""
    run, net, optimizer, batches = prepared(strategy)
    for x, y in batches:
        run.forward_backward(partial(twice, net), x, y)
        for _ in range(steps):
            optimizer.step()


def refused(steps: int) -> str:
    with pytest.raises(UsageError) as error:
        unzeroed(SERVERS, steps)
    return str(error.value)


def test_gradients_that_servers_have_stepped_are_not_taken_for_zero_in_silence() -> None:
    ((never_zeroed, stepped_twice),) = world.run(1, in_turn, refused, (1,), (2,))
    assert "were not zeroed, as that of" in never_zeroed
    assert "Call optimizer.zero_grad() after each step" in never_zeroed
    assert "a second step by the gradients of one pass" in stepped_twice
    assert "test_server_any_step.py:" in stepped_twice


def averaged(strategy: str) -> dict[str, Tensor]:
    """Average the weights between steps by hand, after another call of the run."""
    run, net, optimizer, batches = prepared(strategy)
    if "server" in strategy:
        make_late(run)
    average = [parameter.detach().clone() for parameter in net.parameters()]
    for x, y in batches:
        optimizer.zero_grad()
        run.forward_backward(lambda x, y: F.cross_entropy(net(x), y), x, y)
        optimizer.step()
        run.gather(torch.ones(1))
        with torch.no_grad():
            for mean, parameter in zip(average, net.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
    return {str(index): value for index, value in enumerate(average)}


@pytest.mark.slow
def test_weights_that_are_read_after_any_call_of_the_run_are_those_of_the_step() -> None:
    (expected, found), _ = world.run(2, in_turn, averaged, ("ddp",), (SERVERS,))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
