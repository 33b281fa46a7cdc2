"""What crosses the cuts: who sends what to whom in which order, and how it is described."""

import pytest
import torch

from shoal.errors import UsageError
from shoal.strategies.pipeline.p2p import message_after, message_before, messages
from shoal.strategies.pipeline.schedules import SCHEDULES, problems, table
from shoal.strategies.pipeline.stage import NameTree, collect
from shoal.strategies.pipeline.tensor_meta import TensorMeta, decoded, encoded


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 1)])
def test_every_message_that_is_needed_is_sent_once(
    name: str, ranks: int, microbatches: int
) -> None:
    if problems(name, ranks, microbatches):
        pytest.skip("no such table")
    made = table(name, ranks, microbatches)
    for receiver, row in enumerate(made.rows):
        needed = [
            message for action in row if (message := message_before(made, action)) is not None
        ]
        own = [message for action in row if (message := message_after(made, action)) is not None]
        sent = [message for sender in range(ranks) for message in messages(made, sender, receiver)]
        assert sorted(set(needed) - set(own)) == sorted(sent)
        assert len(needed) == len(set(needed))


def test_a_header_tells_types_shapes_and_who_has_a_gradient() -> None:
    forms = (
        TensorMeta(torch.float64, (3, 1, 7), True),
        TensorMeta(torch.bool, (), False),
        TensorMeta(torch.bfloat16, (0, 5), True),
    )
    assert decoded(encoded(forms, torch.device("cpu"))) == forms
    assert decoded(encoded((), torch.device("cpu"))) == ()


def test_more_tensors_than_a_header_describes_are_refused() -> None:
    with pytest.raises(UsageError, match="100 tensors cross one cut"):
        encoded((TensorMeta(torch.float32, (1,), True),) * 100, torch.device("cpu"))


class Awkward(torch.nn.Module):
    """Layers with the names of what a ModuleDict can do."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.items = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.keys = torch.nn.Parameter(torch.ones(2))


def test_layers_may_be_called_what_a_container_calls_its_methods() -> None:
    model = Awkward()
    kept = collect(model, {"values", "items", "keys"})
    assert isinstance(kept, NameTree)
    assert kept.values is model.values  # type: ignore[comparison-overlap]
    assert set(kept.state_dict()) == set(model.state_dict())
    assert dict(kept.named_parameters()).keys() == dict(model.named_parameters()).keys()
