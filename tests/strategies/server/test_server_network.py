"""A network that cuts connections inside a frame, repeats or delays frames loses no step."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from connected_channels import needs_tls
from fault_injection import STEPS, check, trained, trials
from faulty_network import Trouble
from torch import Tensor

from shoal.parameter_server.codec import Op
from shoal.parameter_server.launcher import ClusterLauncher
from shoal.parameter_server.transport import stream
from shoal.testing import world

TROUBLES = {
    "cut": [Op.PUSH, Op.STEP, Op.PARAMS, Op.REPLICATE, Op.ACKNOWLEDGE],
    "truncate": [Op.PUSH, Op.PARAMS, Op.UPDATE_META, Op.REPLICATE, Op.ACKNOWLEDGE],
    "replay": [Op.PUSH, Op.STEP, Op.PARAMS, Op.REPLICATE],
    "slow": [Op.PUSH, Op.REPLICATE],
    "late": [Op.ACKNOWLEDGE, Op.REPLICATE, Op.PARAMS],
}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensor]:
    return world.run(2, trained, "server=2,part_mb=0.01")[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", trials())
@pytest.mark.parametrize("what", TROUBLES)
def test_a_bad_network_changes_no_bit(
    what: str, seed: int, undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    op = TROUBLES[what][seed % len(TROUBLES[what])]
    check(trained_in_trouble(what, op, seed, tmp_path), undisturbed)


def trained_in_trouble(what: str, op: Op, seed: int, folder: Path) -> Any:
    """Return the weights of two workers at the end of a run."""
    chance = Random(f"{what} {seed}")
    late_s = chance.choice([0.3, 1.5])  # shorter and longer than a lease
    trouble = Trouble(folder, what, op, chance.randint(1, 60), late_s)
    shared = str(chance.random() < 0.3).lower()
    strategy = f"server=2,replicas=2,lease_s=1,shared_memory={shared},part_mb=0.01"
    found = world.run(2, trained, strategy, trouble, timeout_s=30)
    assert trouble.mark.exists(), f"nothing happened to {op.name}"
    return found


def trained_under_short_keys(strategy: str) -> Any:
    """Train over TLS whose keys are for fewer bytes than a run sends."""
    ClusterLauncher._listen_host = lambda _: "127.0.0.1"  # type: ignore[method-assign]
    stream.KEY_LIMIT_BYTES = 40_000
    made = stream.TlsStream.__init__

    def counted(self: Any, *words: Any) -> None:
        counted.connections += 1  # type: ignore[attr-defined]
        made(self, *words)

    counted.connections = 0  # type: ignore[attr-defined]
    stream.TlsStream.__init__ = counted  # type: ignore[method-assign]
    return *trained(strategy), counted.connections  # type: ignore[attr-defined]


@needs_tls
def test_connections_are_made_again_under_new_keys_and_change_no_bit(
    undisturbed: dict[str, Tensor],
) -> None:
    found = world.run(2, trained_under_short_keys, "server=2,part_mb=0.01,shared_memory=false")
    check([(weights, figures) for weights, figures, _ in found], undisturbed)
    assert all(connections > 6 for _, _, connections in found)  # without the limit 3, or 4


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("fault", ["slow", "SIGSTOP worker"])
def test_no_worker_reads_further_ahead_than_allowed(
    fault: str, staleness: int, tmp_path: Path
) -> None:
    trouble = Trouble(tmp_path, fault, Op.PUSH, 60)
    strategy = f"server=2,replicas=2,part_mb=0.01,lease_s=1,staleness={staleness}"
    found = world.run(2, trained, strategy, trouble, 1.0, timeout_s=30)
    assert trouble.mark.exists()
    for figures in (figures for _, figures in found):
        for figure in figures:
            seen = {int(gap): count for gap, count in figure["staleness"].items()}
            assert max(seen) <= staleness
            assert figure["clock"] == 2 * STEPS  # each push is a step, and was taken once
    if fault != "slow":
        assert (
            max(int(gap) for figure in found[0][1] for gap in figure["staleness"]) == staleness
        )  # it was held there
