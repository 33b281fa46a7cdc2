"""A trial of the loss where the stages of a pipeline hold the models.

    one forward pass, without a graph     stage 0 ──> stage 1 ──> last stage: compute_loss returns
    trial, there alone                    on the recorded outputs, as `recorded_outputs.py` does

The batch passes the stages in one piece, for the parts of it must add up whatever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from shoal.data.seeds import GeneratorStates
from shoal.data.tree_map import tensors_in
from shoal.trial.recorded_outputs import OutputRecorder, RecordedCall, map_tensors, plain_nest
from shoal.trial.untouched import devices_of


class StagedRecord(NamedTuple):
    """Record of a forward pass, on the rank of the last stage.

    Attributes:
        calls: of the models, with their outputs.
        generators: as `compute_loss` found them.
    """

    calls: list[RecordedCall]
    generators: GeneratorStates


def record_in_stages(batch: Any, models: Sequence[nn.Module], call: Any) -> StagedRecord | None:
    """Run the function of a batch through all stages. Collective over the pipeline.

    Args:
        batch: a LocalBatch, the same on all ranks of the pipeline.
        call: `OutsideStep.call` of the local model.

    Returns: None where this rank is not that of the last stage.
    """
    given = {id(tensor) for tensor in tensors_in([batch.args, batch.kwargs])}
    recording = _PassThroughStages(
        batch.compute_loss, OutputRecorder(models), given, devices_of(models)
    )

    def recorded(*args: Any, **kwargs: Any) -> list[Tensor]:
        return recording.run(*args, **kwargs)

    values = call(recorded, *batch.args, **batch.kwargs)
    return recording.record(values)


class _PassThroughStages:
    """A forward pass. A stage that is not the last one leaves the function before its end.

    Args: given: ids of the batch's own tensors, which every rank has.
    """

    def __init__(
        self,
        compute_loss: Callable[..., Any],
        recorder: OutputRecorder,
        given: set[int],
        devices: Any,
    ) -> None:
        self._compute_loss = compute_loss
        self._recorder = recorder
        self._given = given
        self._devices = devices
        self._found: StagedRecord | None = None

    def run(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Run the function; return the tensors that models were given and have returned."""
        self._found = None  # a dry run has come to the end on every rank
        generators = GeneratorStates(self._devices)
        with self._recorder.recording():
            self._compute_loss(*args, **kwargs)
        self._found = StagedRecord(self._recorder.calls, generators)
        # What an earlier stage has made reaches the last one because it is returned.
        return [tensor for call in self._found.calls for tensor in self._made(call)]

    def _made(self, call: RecordedCall) -> list[Tensor]:
        outputs = [] if call.output is None else plain_nest(call.output)
        inputs = [each for each in tensors_in(call.inputs) if id(each) not in self._given]
        return [*inputs, *outputs]

    def record(self, values: list[Tensor]) -> StagedRecord | None:
        """Return the record with `values` in the place of the tensors that `run` has returned."""
        if self._found is None:
            return None
        made = iter(values)
        calls = []
        for call in self._found.calls:
            inputs = [x if id(x) in self._given else next(made) for x in tensors_in(call.inputs)]
            output = None if call.output is None else map_tensors(call.output, lambda _: next(made))
            calls.append(RecordedCall(call.model, inputs, output))
        return self._found._replace(calls=calls)
