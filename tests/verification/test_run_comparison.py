"""Two recorded runs: the first difference and the class of its cause, without other processes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import RecordError
from shoal.verification.script.run_comparison import compare_runs
from shoal.verification.script.run_record import RankRecord, RecordWriter
from shoal.verification.script.script_recorder import EnoughSteps, ScriptRecorder
from shoal.verification.script.script_report import ScriptReport

Fault = Callable[["Net", torch.optim.Optimizer, int], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)
        self.gain = 1.0
        self.smoothness = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.inner(x) * self.gain))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output = self(x)
        neighbours = (output[1:] - output[:-1]).abs().mean()
        return F.cross_entropy(output, y) + self.smoothness * neighbours


def record(folder: Path, fault: Fault | None = None, early: Fault | None = None) -> Path:
    """Record three steps. Args: fault: is called before each step. early: before each pass."""
    torch.manual_seed(0)
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    recorder = ScriptRecorder(RecordWriter(folder, 0), RankRecord(0, 1), 3)
    recorder.start()
    try:
        for step in range(1, 5):
            x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
            if early is not None:
                early(net, optimizer, step)
            optimizer.zero_grad(set_to_none=step != 3 or early is None)
            net.loss(x, y).backward()
            if fault is not None:
                fault(net, optimizer, step)
            optimizer.step()
    except EnoughSteps:
        pass
    finally:
        recorder.stop()
    return folder


def compared(
    tmp_path: Path, fault: Fault | None = None, early: Fault | None = None
) -> ScriptReport:
    return compare_runs(
        record(tmp_path / "one"), record(tmp_path / "many", fault, early), tolerance=1e-10
    )


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_equal_runs_are_exact(tmp_path: Path) -> None:
    report = compared(tmp_path)
    assert (report.verdict, report.exit_code, report.first, report.steps) == ("exact", 0, None, 3)
    assert report.largest == 0


def test_one_factor_of_all_gradients_is_a_scale(tmp_path: Path) -> None:
    def fault(net: Net, _: torch.optim.Optimizer, step: int) -> None:
        for parameter in net.parameters() if step == 2 else ():
            gradient(parameter).mul_(0.5)

    report = compared(tmp_path, fault)
    assert report.first is not None
    assert report.first.what == "step 2, backward, head.weight"
    assert (report.cause.kind, report.cause.factor) == ("scale", pytest.approx(0.5))


def test_gradients_of_one_layer_are_a_scale_of_these_alone(tmp_path: Path) -> None:
    def fault(net: Net, _: torch.optim.Optimizer, step: int) -> None:
        gradient(net.inner[2].weight).mul_(3)

    report = compared(tmp_path, fault)
    assert report.first is not None
    assert (report.first.module, report.first.parameter) == ("inner.2", "inner.2.weight")
    assert report.cause.kind == "scale"
    assert report.cause.parameters == ("inner.2.weight",)


def test_a_gradient_that_is_missing_is_named(tmp_path: Path) -> None:
    def fault(net: Net, _: torch.optim.Optimizer, step: int) -> None:
        net.norm.weight.grad = None

    report = compared(tmp_path, fault)
    assert report.first is not None
    assert report.first.parameter == "norm.weight"
    assert report.cause.kind == "missing gradient"


def test_a_wrong_direction_is_a_wrong_gradient_of_that_layer(tmp_path: Path) -> None:
    def fault(net: Net, _: torch.optim.Optimizer, step: int) -> None:
        gradient(net.inner[0].weight).add_(0.01)

    report = compared(tmp_path, fault)
    assert report.first is not None
    assert (report.first.module, report.cause.kind) == ("inner.0", "wrong gradient")


def test_gradients_that_hold_earlier_ones_are_wrong_from_the_last_layer_on(tmp_path: Path) -> None:
    kept: list[list[Tensor]] = []

    def fault(net: Net, _: torch.optim.Optimizer, step: int) -> None:
        if step == 1:
            kept.append([gradient(p).clone() for p in net.parameters()])
        if step == 2:
            for parameter, earlier in zip(net.parameters(), kept[0], strict=True):
                gradient(parameter).add_(earlier)

    assert compared(tmp_path, fault).cause.kind == "wrong gradient"


def test_a_loss_that_is_wrong_by_no_weight_of_samples_takes_them_together(tmp_path: Path) -> None:
    def early(net: Net, _: torch.optim.Optimizer, step: int) -> None:
        net.smoothness = 0.1 if step == 2 else 0.0

    report = compared(tmp_path, early=early)
    assert report.first is not None
    assert (report.first.phase, report.cause.kind) == ("loss", "loss")
    assert "takes several samples together" in report.cause.sentence


def test_a_wrong_output_names_the_first_module_in_the_order_of_execution(tmp_path: Path) -> None:
    def early(net: Net, _: torch.optim.Optimizer, step: int) -> None:
        net.gain = 1.001 if step == 2 else 1.0
        net.inner[2].bias.data.add_(0.001 if step == 2 else 0)

    report = compared(tmp_path, early=early)
    assert report.first is not None
    assert (report.first.what, report.cause.kind) == ("step 2, forward, inner.2", "wrong output")
    assert report.first.line.startswith("test_run_comparison.py:")


def test_weights_that_are_wrong_after_right_gradients_are_an_update(tmp_path: Path) -> None:
    def rate(_: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.2

    def idle(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.param_groups[0]["params"] = [
            p for p in net.parameters() if p is not net.head.bias
        ]

    report = compared(tmp_path / "rate", rate)
    assert report.first is not None
    assert (report.first.phase, report.cause.kind) == ("update", "update")
    assert "lr of group 0 is 0.2, and 0.1 on one" in report.cause.sentence
    assert compared(tmp_path / "idle", idle).cause.kind == "not updated"


def test_a_buffer_that_differs_alone_is_named(tmp_path: Path) -> None:
    def fault(net: Net, _: torch.optim.Optimizer, step: int) -> None:
        net.norm.running_mean.add_(1)  # type: ignore[union-attr]

    report = compared(tmp_path, fault)
    assert report.first is not None
    assert (report.first.phase, report.first.parameter) == ("buffers", "norm.running_mean")
    assert (report.verdict, report.cause.kind) == ("differs", "wrong buffer")


def test_a_folder_without_a_whole_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="of its ranks there are none"):
        compare_runs(tmp_path, tmp_path)


def test_a_file_that_differs_after_right_steps_is_named(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("many", 2.0)):
        record(tmp_path / name)
        (tmp_path / name / "rank-0/files").mkdir()
        torch.save({"a": torch.full((2,), value)}, tmp_path / name / "rank-0/files/0-model.pt")
    report = compare_runs(tmp_path / "one", tmp_path / "many")
    assert report.first is not None
    assert (report.first.phase, report.first.parameter) == ("files", "model.pt")
    assert report.cause.kind == "file"
