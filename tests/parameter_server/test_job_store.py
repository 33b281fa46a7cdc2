"""Jobs for servers on other hosts: what is published, and who is believed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shoal.errors import ConfigError, StrategyRefused, WireError
from shoal.launch.private_memory import SECRET as SECRET_VARIABLE
from shoal.launch.private_memory import PrivateMemory
from shoal.parameter_server.cluster_config import ClusterConfig, ShardSettings
from shoal.parameter_server.job_store import COUNT, JobStore
from shoal.parameter_server.launcher import replicas_on_host
from shoal.parameter_server.optimizer_spec import kind_of_name, name_of_kind, recipe_of
from shoal.parameter_server.partitioning import ParamMeta, partition
from shoal.parameter_server.transport.key import derived_key
from shoal.parameter_server.transport.settings import Transport

SECRET = bytes(range(32))


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TCPStore]]:
    """Yield the store of the ranks, in a list: it listens until nobody holds it any more."""
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    memory = PrivateMemory(SECRET_VARIABLE, "shoal-secret", SECRET)
    for name, value in {**memory.variables, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(stores[0].port))
    yield stores
    memory.close()
    stores.clear()


def new_job(optimizer: torch.optim.Optimizer, compress: str = "none") -> ClusterConfig:
    metas = {"w": ParamMeta(5_000, torch.float64, 0), "b": ParamMeta(9, torch.bfloat16, 1)}
    settings = ShardSettings(
        tuple(partition(metas, 8_000)), recipe_of(optimizer), 3, None, 2.5, compress
    )
    owners = tuple(number % 2 for number in range(len(settings.parts)))
    transport = Transport(derived_key(SECRET, "name"), "name", encrypt=False)
    return ClusterConfig(transport, Path(), settings, owners, 2, 2)


def test_a_job_is_the_same_on_another_host(stores: list[TCPStore]) -> None:
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": weights[:1], "lr": 0.1}, {"params": weights[1:], "betas": (0.5, 0.9)}]
    job = new_job(torch.optim.AdamW(groups), "topk=0.01")
    JobStore().publish(job.to_json())
    found = ClusterConfig.from_json(JobStore().wait_for(1), SECRET)
    assert found == job
    assert found.settings.compress == "topk=0.01"
    assert SECRET.hex() not in job.to_json()


def test_jobs_come_in_their_order(stores: list[TCPStore]) -> None:
    for job in ("first", "second"):
        JobStore().publish(job)
    assert [JobStore().wait_for(number) for number in (1, 2)] == ["first", "second"]


def test_a_job_of_somebody_without_the_secret_is_refused(stores: list[TCPStore]) -> None:
    JobStore().publish("good")
    (store,) = stores
    sealed = store.get(f"{COUNT} 1").decode()
    store.set(f"{COUNT} 2", sealed)  # of another number
    store.set(f"{COUNT} 3", sealed.replace("good", "evil"))
    for number in (2, 3):
        with pytest.raises(WireError, match=f"job {number} in the store .* does not belong"):
            JobStore().wait_for(number)


class OwnSgd(torch.optim.SGD):
    elementwise = True


def test_an_optimizer_is_found_by_its_module_or_refused() -> None:
    class Local(OwnSgd):
        pass

    assert kind_of_name(name_of_kind(OwnSgd)) is OwnSgd
    with pytest.raises(StrategyRefused, match="Local is a class of the script itself"):
        name_of_kind(Local)
    with pytest.raises(ConfigError, match=r"Sgd of no\.such cannot be imported on a server host"):
        kind_of_name("no.such:Sgd")


def test_a_host_without_servers_has_no_replica_of_any_shard() -> None:
    assert [replicas_on_host(shard, 2, None, 2) for shard in range(3)] == [0, 0, 0]
