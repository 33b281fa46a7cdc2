"""The library's face: five lines that are right, and errors with a cure where they would not be."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import shoal
from shoal.comm import mesh
from shoal.errors import LaunchError, StrategyRefused, UsageError
from shoal.testing import world


def data(samples: int = 10) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator))


def parts(model: nn.Module | None = None, batch_size: int = 4) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    model = model or nn.Linear(4, 3).double()
    loader = DataLoader(data(), batch_size=batch_size, shuffle=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def quiet() -> shoal.Run:
    return shoal.init(announce=lambda _: None)


def test_the_header_spells_the_global_batch() -> None:
    said: list[str] = []
    shoal.init(announce=said.append, accumulate=2).prepare(*parts())
    assert said == ["global batch 4 = 1 rank x 2 x 2 accumulated"]


def test_batch_norm_and_dropout_are_named_before_the_run_where_ranks_would_differ() -> None:
    said: list[str] = []
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 3)).double()
    shoal.init(announce=said.append, accumulate=2).prepare(*parts(model))
    assert [line.split()[1] for line in said[1:]] == ["BatchNorm", "dropout"]


def test_a_bare_backward_is_an_error_with_the_cure() -> None:
    model, _, _ = quiet().prepare(*parts())
    with pytest.raises(UsageError, match=r"bare \.backward\(\).*run\.forward_backward"):
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_missing_prepare_is_an_error_with_the_cure() -> None:
    run = quiet()
    model, _, loader = parts()
    x, y = next(iter(loader))
    with pytest.raises(UsageError, match=r"no model was prepared.*run\.prepare"):
        run.forward_backward(F.cross_entropy, model, x, y)


def test_a_model_that_is_not_the_prepared_one_is_an_error() -> None:
    run = quiet()
    _, _, loader = run.prepare(*parts())
    x, y = next(iter(loader))
    with pytest.raises(UsageError, match="not the prepared model"):
        run.forward_backward(F.cross_entropy, nn.Linear(4, 3), x, y)


def test_a_second_prepare_is_an_error() -> None:
    run = quiet()
    run.prepare(*parts())
    with pytest.raises(UsageError, match="has prepared a model already"):
        run.prepare(*parts())


def test_an_optimizer_that_lost_a_parameter_is_named() -> None:
    model, _, loader = parts()
    with pytest.raises(UsageError, match=r"bias: trainable, but in no group.*requires_grad_\(False\)"):
        quiet().prepare(model, torch.optim.SGD([model.weight], lr=0.1), loader)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, _, loader = parts()
    with pytest.raises(UsageError, match="do not belong to the model"):
        quiet().prepare(model, torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1), loader)


def test_a_frozen_parameter_may_be_in_the_optimizer_and_never_moves() -> None:
    model, optimizer, loader = parts()
    model.bias.requires_grad_(False)
    before = model.bias.clone()
    run = quiet()
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for x, y in loader:
        run.forward_backward(F.cross_entropy, model, x, y)
        optimizer.step()
    assert torch.equal(model.bias, before)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    run = quiet()
    model, _, loader = run.prepare(*parts())
    x, y = next(iter(loader))
    with pytest.raises(UsageError, match=r"shape \(4,\).*mean over its batch"):
        run.forward_backward(lambda output, target: F.cross_entropy(output, target, reduction="none"), model, x, y)


class Endless(IterableDataset):
    def __iter__(self):  # type: ignore[no-untyped-def]
        yield torch.ones(4), 0


def test_an_iterable_dataset_is_refused_with_the_cure() -> None:
    model, optimizer, _ = parts()
    with pytest.raises(UsageError, match=r"Endless is an IterableDataset.*map-style"):
        quiet().prepare(model, optimizer, DataLoader(Endless(), batch_size=2))


def test_a_batch_sampler_is_refused_with_the_cure() -> None:
    class Own(BatchSampler):
        pass

    model, optimizer, _ = parts()
    loader = DataLoader(data(), batch_sampler=Own(SequentialSampler(data()), 2, False))
    with pytest.raises(UsageError, match=r"batch_sampler of its own.*sampler=\.\.\."):
        quiet().prepare(model, optimizer, loader)


def test_clipping_gives_the_norm_before_and_bounds_it_after() -> None:
    run = quiet()
    model, _, loader = run.prepare(*parts())
    x, y = next(iter(loader))
    run.forward_backward(F.cross_entropy, model, x, y)
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(run.clip_gradients(0.01), expected)
    assert torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])) < 0.0101


def test_saved_weights_load_without_pickle_and_leave_no_partial_file(tmp_path: Path) -> None:
    run = quiet()
    model, _, _ = run.prepare(*parts())
    run.save(tmp_path / "deep" / "model.pt")
    loaded = torch.load(tmp_path / "deep" / "model.pt", weights_only=True)
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model.pt"]


def test_state_given_back_makes_the_same_next_steps() -> None:
    def steps(
        run: shoal.Run, model: nn.Module, optimizer: torch.optim.Optimizer, loader: object, count: int
    ) -> list[float]:
        losses = []
        while len(losses) < count:
            for x, y in loader:  # type: ignore[attr-defined]
                optimizer.zero_grad()
                losses.append(run.forward_backward(F.cross_entropy, model, x, y).item())
                optimizer.step()
                if len(losses) == count:
                    break
        return losses

    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double()
    run = quiet()
    prepared = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), parts()[2])
    for x, y in prepared[2]:
        run.forward_backward(F.cross_entropy, model, x, y)
        prepared[1].step()
        tensors, info, private = run.state()
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        break
    expected = steps(run, *prepared, count=2)
    other = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double()
    again = quiet()
    prepared = again.prepare(other, torch.optim.AdamW(other.parameters(), lr=0.1), parts()[2])
    again.load_state(tensors, info, private)
    # Leaving the loop early ended that epoch for the first run; the second goes on in the middle of it.
    assert prepared[2].state() == {"epoch": 0, "position": 4}
    prepared[2].restore({"epoch": 1, "position": 0})
    assert steps(again, *prepared, count=2) == expected


def forward_without_a_loader() -> tuple[float, Tensor]:
    run = quiet()
    model, optimizer, _ = parts(nn.Linear(4, 3).double())
    model, optimizer, _ = run.prepare(model, optimizer)
    x, y = data().tensors
    mine = slice(0, 7) if run.rank == 0 else slice(7, 10)
    loss = run.forward_backward(F.cross_entropy, model, x[mine], y[mine])
    return loss.item(), model.weight.grad.clone()


def test_batches_of_ones_own_are_weighed_by_their_rows() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x, y = data().tensors
    expected = F.cross_entropy(model(x), y)
    expected.backward()
    for loss, gradient in world.run(2, forward_without_a_loader):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        assert torch.allclose(gradient, model.weight.grad, rtol=1e-10, atol=0)


class Fickle(nn.Module):
    """Uses one layer in the first step and the other afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(4, 3), nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        both: Tensor = self.first(x) + (self.second(x) if self.calls == 1 else 0)
        return both


BUCKETS = "ddp,bucket_mb=0.0001"  # smaller than a small model, which goes in one message otherwise


def train_fickle(strategy: str) -> None:
    run = shoal.init(strategy, announce=lambda _: None)
    model, optimizer, loader = run.prepare(*parts(Fickle().double()))
    for x, y in loader:
        run.forward_backward(F.cross_entropy, model, x, y)
        optimizer.step()


def test_a_parameter_that_stops_being_used_is_named_in_that_very_step() -> None:
    with pytest.raises(LaunchError, match=r"second\.weight, second\.bias: no gradient in this step.*unused=true"):
        world.run(2, train_fickle, BUCKETS)


@pytest.mark.parametrize("strategy", [f"{BUCKETS},unused=true", "ddp"])
def test_a_parameter_that_stops_being_used_is_fine_where_that_was_announced_or_one_message_says_it(
    strategy: str,
) -> None:
    world.run(2, train_fickle, strategy)


def measure_too_much() -> None:
    run = quiet()
    model, _, loader = run.prepare(*parts())
    x, y = next(iter(loader))
    run.forward_backward(F.cross_entropy, model, x, y, measure=lambda output, target: torch.ones(14))


def test_more_measures_than_ddp_carries_are_refused() -> None:
    with pytest.raises(LaunchError, match="measure returned 14 numbers; a step carries 13"):
        world.run(2, measure_too_much)


def rank_dependent_start() -> Tensor:
    run = quiet()
    torch.manual_seed(run.rank)
    model, _, _ = run.prepare(*parts(nn.Linear(4, 3).double()))
    weight: Tensor = model.weight.detach().clone()
    return weight


def test_every_rank_starts_from_rank_0s_weights() -> None:
    first, second = world.run(2, rank_dependent_start)
    assert torch.equal(first, second)


def measured() -> list[list[float]]:
    run = quiet()
    model, _, loader = run.prepare(*parts())
    totals = []
    for x, y in loader:
        run.forward_backward(F.cross_entropy, model, x, y, measure=lambda output, target: target.double().sum()[None])
        assert run.totals is not None
        totals.append(run.totals[1:4].tolist())
    return totals


def test_counts_and_measures_of_a_step_are_sums_over_all_ranks() -> None:
    single = measured()
    assert [count for count, _, _ in single] == [4, 4, 2]
    assert world.run(3, measured) == [single] * 3


def stop_seen_by_all() -> list[bool]:
    run = quiet()
    model, _, loader = run.prepare(*parts())
    seen = []
    for step, (x, y) in enumerate(loader):
        if run.rank == 1 and step == 1:
            run.request_stop()
        run.forward_backward(F.cross_entropy, model, x, y)
        seen.append(run.stopping())
    return seen


def test_all_ranks_learn_of_a_stop_in_the_same_step() -> None:
    assert world.run(2, stop_seen_by_all) == [[False, True, True]] * 2


def fp16_overflow(strategy: str) -> tuple[list[float], bool]:
    run = shoal.init(strategy, precision="fp16", announce=lambda _: None)
    model = nn.Linear(4, 3)
    dataset = TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(dataset, batch_size=4)
    )
    before, scales, moved = run.weights()["weight"].clone(), [], False
    for step, (x, y) in enumerate(loader):
        x = x * (1e30 if step == 0 and run.rank == 1 else 1)
        run.forward_backward(lambda out, y: F.cross_entropy(out.float(), y), model, x, y)
        optimizer.step()
        scales.append(run.state()[1]["loss_scale"]["scale"])
        moved = moved or (step == 0 and not torch.equal(run.weights()["weight"], before))
    return scales, moved


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(strategy: str) -> None:
    assert world.run(2, fp16_overflow, strategy) == [([32768.0, 32768.0], False)] * 2


def test_an_unknown_strategy_and_an_unknown_option_are_named() -> None:
    with pytest.raises(shoal.ShoalError, match="'dpp' is not known; did you mean 'ddp'"):
        shoal.init("dpp")
    with pytest.raises(shoal.ShoalError, match="option 'unsed' is not known; did you mean 'unused'"):
        shoal.init("ddp,unsed=true")


def single_in_a_world_of_two() -> None:
    shoal.init("single", announce=lambda _: None).prepare(*parts())


def test_single_refuses_a_world_of_two() -> None:
    with pytest.raises(LaunchError, match="single trains on one rank; there are 2"):
        world.run(2, single_in_a_world_of_two)


def test_ddp_refuses_a_model_without_trainable_parameters() -> None:
    model, optimizer, loader = parts()
    model.requires_grad_(False)
    with pytest.raises(StrategyRefused, match="no trainable parameter"):
        quiet().prepare(model, optimizer, loader)


def weighed_mean(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Weights that sum to far less than one."""
    weights = (1.0 + target.double()) / 100
    return (F.cross_entropy(output.double(), target, reduction="none") * weights).sum(), weights.sum()


def two_calls(loss_fn: str, precision: str, with_loader: bool) -> list[Tensor]:
    run = shoal.init(precision=precision, announce=lambda _: None)  # type: ignore[arg-type]
    model, optimizer, loader = parts(batch_size=10)
    prepared = run.prepare(model, optimizer, loader if with_loader else None)
    x, y = next(iter(prepared[2])) if with_loader else [t[run.rank :: run.world] for t in data().tensors]
    function = weighed_mean if loss_fn == "weighed" else F.cross_entropy
    gradients = []
    for _ in range(2):
        run.forward_backward(function, model, x, y)
        gradients.append(model.weight.grad.clone())
    return gradients


@pytest.mark.parametrize("with_loader", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("loss_fn", ["mean", "weighed"])
def test_a_second_call_before_the_step_adds_its_gradients(loss_fn: str, precision: str, with_loader: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x, y = data().tensors
    value = weighed_mean(model(x), y) if loss_fn == "weighed" else F.cross_entropy(model(x), y)
    (value[0] / value[1] if isinstance(value, tuple) else value).backward()
    tolerance = 1e-10 if precision == "fp32" else 1e-2
    for once, twice in world.run(2, two_calls, loss_fn, precision, with_loader):
        assert torch.allclose(once, model.weight.grad, rtol=tolerance, atol=tolerance / 10)
        assert torch.allclose(twice, 2 * once, rtol=tolerance, atol=tolerance / 10)


def test_a_batch_of_ignored_samples_gives_zeros_and_no_nan() -> None:
    run = quiet()
    model, _, loader = run.prepare(*parts())
    x, y = next(iter(loader))
    loss = run.forward_backward(lambda out, y: (out.sum() * 0, torch.zeros(())), model, x, y)
    assert loss == 0
    assert torch.equal(model.weight.grad, torch.zeros_like(model.weight))


def test_a_distributed_sampler_is_refused_with_the_cure() -> None:
    from torch.utils.data.distributed import DistributedSampler

    model, optimizer, _ = parts()
    sampler: DistributedSampler = DistributedSampler(data(), num_replicas=2, rank=0)
    with pytest.raises(UsageError, match=r"DistributedSampler, which gives every rank other samples.*shuffle=True"):
        quiet().prepare(model, optimizer, DataLoader(data(), batch_size=2, sampler=sampler))


def test_a_parameter_unfrozen_after_prepare_is_named() -> None:
    run = quiet()
    model, optimizer, loader = parts()
    model.bias.requires_grad_(False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    model.bias.requires_grad_(True)
    x, y = next(iter(loader))
    with pytest.raises(UsageError, match="bias: unfrozen after prepare"):
        run.forward_backward(F.cross_entropy, model, x, y)


def test_accumulation_without_a_loader_is_refused() -> None:
    model, optimizer, _ = parts()
    with pytest.raises(UsageError, match="accumulate splits what the loader shares out"):
        shoal.init(accumulate=2, announce=lambda _: None).prepare(model, optimizer)


def test_an_evaluation_leaves_every_module_in_the_mode_that_it_had() -> None:
    run = quiet()
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    model[0].eval()
    found = run.evaluate(lambda out, y: {"ones": (y >= 0).sum()}, model, DataLoader(data(), batch_size=4))
    assert found == {"samples": 10.0, "ones": 10.0}
    assert [module.training for module in model.modules()] == [True, False, True]


def test_a_schedulers_rate_comes_back_with_the_state() -> None:
    run, again = quiet(), quiet()
    _, optimizer, _ = run.prepare(*parts())
    optimizer.param_groups[0]["lr"] = 0.025
    _, other, _ = again.prepare(*parts())
    again.load_state(*run.state())
    assert other.param_groups[0]["lr"] == 0.025


def kept_totals() -> list[float]:
    run = quiet()
    model, _, loader = run.prepare(*parts())
    kept = []
    for x, y in loader:
        run.forward_backward(F.cross_entropy, model, x, y)
        kept.append(run.totals)
    return [totals[1].item() for totals in kept if totals is not None]


def test_totals_of_a_step_stay_what_they_were() -> None:
    assert world.run(2, kept_totals) == [[4.0, 4.0, 2.0]] * 2


def own_group_of_another_size() -> None:
    import os

    os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", SHOAL_EXPECTED_WORLD="1")
    shoal.init()


def test_a_process_group_that_contradicts_the_environment_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"process group says rank . of 2, the environment"):
        world.run(2, own_group_of_another_size)


def engine_after_leaving() -> bool:
    run = shoal.init(BUCKETS, announce=lambda _: None)
    model, _, loader = run.prepare(*parts())
    for x, y in loader:
        run.forward_backward(F.cross_entropy, model, x, y)
    engine = weakref.ref(next(object for object in gc.get_objects() if type(object) is DistributedDataParallel))
    mesh.leave()
    return engine() is None


def test_nothing_of_ours_holds_a_process_group_that_was_left() -> None:
    assert world.run(2, engine_after_leaving) == [True, True]
