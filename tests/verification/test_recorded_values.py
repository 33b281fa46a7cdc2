"""Parts of the proof of scripts: joined ranks, ratios of gradients, names, and float64."""

import pytest
import torch
from torch import nn

from shoal.verification.script.likely_cause import common_factor, in_words, row_factors
from shoal.verification.script.model_names import ModelNames, plain_name
from shoal.verification.script.same_start import Float64Everywhere
from shoal.verification.script.step_comparison import versions


def test_rows_of_data_ranks_and_micro_batches_are_joined_in_order() -> None:
    whole = torch.arange(10.0).reshape(5, 2)
    pieces = [[whole[:2], whole[2:3]], [whole[3:]]]
    assert [v.tolist() for v in versions([pieces], whole, has_stand_ins=False)] == [whole.tolist()]


def test_columns_of_tensor_ranks_are_joined_and_copies_stay_apart() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    slices = [[[whole[:, :2]]], [[whole[:, 2:]]]]
    assert torch.equal(versions(slices, whole, has_stand_ins=False)[0], whole)
    assert len(versions([[[whole]], [[whole]]], whole, has_stand_ins=False)) == 2
    assert versions([[[whole[:, :3]]]], whole, has_stand_ins=False) == []


def test_slices_of_three_matrices_in_one_are_joined_in_the_order_that_one_process_has() -> None:
    whole = torch.arange(24.0).reshape(2, 12)
    matrices = whole.chunk(3, 1)
    slices = [[[torch.cat([m[:, :2] for m in matrices], 1)]]]
    slices.append([[torch.cat([m[:, 2:] for m in matrices], 1)]])
    assert torch.equal(versions(slices, whole, has_stand_ins=False)[0], whole)


def test_rows_of_a_model_that_puts_time_first_are_joined_within_each_time() -> None:
    whole = torch.arange(30.0).reshape(3, 5, 2)  # time, sample, width
    pieces = [[whole[:, :3].flatten(0, 1)], [whole[:, 3:].flatten(0, 1)]]
    flat = whole.flatten(0, 1)
    assert torch.equal(versions([pieces], flat, has_stand_ins=False)[0], flat)


def test_rows_of_stand_ins_are_left_out_under_shoal_alone() -> None:
    whole = torch.ones(2, 3)
    pieces = [[[torch.ones(1, 3)], [torch.ones(1, 3)], [torch.zeros(1, 3)]]]
    assert len(versions(pieces, whole, has_stand_ins=True)) == 1
    assert versions(pieces, whole, has_stand_ins=False) == []


def test_one_factor_is_told_from_several_and_from_another_direction() -> None:
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    halved = {name: value / 2 for name, value in one.items()}
    assert common_factor(one, halved, 1e-6) == pytest.approx(0.5)
    for other in ({"b": one["b"] * 2}, {"a": torch.tensor([2.0, 1.0])}):
        assert common_factor(one, {**one, **other}, 1e-6) is None


def test_rows_have_factors_of_their_own() -> None:
    one = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 1.0]])
    many = one * torch.tensor([[0.9], [1.0], [1.1]])
    assert row_factors(one, many, 1e-6) == pytest.approx([0.9, 1.1])
    assert row_factors(one, many.flip(1), 1e-6) == []
    tokens = torch.stack([one, one])
    assert row_factors(tokens, torch.stack([many, one]), 1e-6) == pytest.approx([0.9, 1.1, 1, 1])
    many[1] = 1.0  # a row that has a gradient on many ranks alone
    assert row_factors(one, many, 1e-6) == pytest.approx([0.9, float("inf"), 1.1])
    assert row_factors(one * torch.tensor([[1.0], [1.0], [0.0]]), many * 0, 1e-6) == [0.0]


def test_factors_are_written_as_people_write_them() -> None:
    assert in_words(0.5, 2) == "1/2 (there are 2 ranks)"
    assert in_words(1 / 3, 2) == "1/3"
    assert in_words(0.70710678, 2) == "0.7071"


def test_names_are_those_of_the_model_within_its_wrappers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    names = ModelNames()
    assert names.find(model[1][0]) == "1.0"
    assert [name for name, _ in names.parameters()][-1] == "1.0.bias"
    assert names.find(nn.MSELoss()) is None
    wrapper = nn.ModuleDict({"_orig_mod": model, "module": model})
    assert plain_name(wrapper, "_orig_mod.1.0.bias") == "1.0.bias"
    assert plain_name(wrapper, "module.1.0.bias") == "module.1.0.bias"


def test_a_script_that_means_float32_computes_in_float64() -> None:
    with Float64Everywhere():
        layer = nn.Linear(2, 2, dtype=torch.float32)
        layer.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
        from_numpy = torch.from_numpy(torch.ones(3, 2, dtype=torch.float32).numpy())
        assert layer(from_numpy).dtype == torch.float64
        assert from_numpy.to(torch.float32).dtype == torch.float64
        assert torch.ones(2).float().dtype == torch.float64
    assert torch.ones(2).dtype == torch.float32
