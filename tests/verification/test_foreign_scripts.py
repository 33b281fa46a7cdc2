"""`shoal.verify_script` on loops with Accelerate, Fabric and transformers: right and wrong ones."""

from pathlib import Path

import pytest

import shoal

SCRIPTS = Path(__file__).parent / "verified_scripts"
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("script", "needs", "wrong", "cause"),
    [
        ("accelerate_loop", "accelerate", "mean of means", "weights of samples"),
        ("fabric_loop", "lightning_fabric", "not reduced", "missing reduction"),
        ("trainer_loop", "transformers", "mean of means", "weights of samples"),
        ("tensor_plan_loop", "transformers", "no reduction", "missing reduction"),
    ],
)
def test_a_right_loop_is_exact_and_a_wrong_one_is_classified(
    script: str,
    needs: str,
    wrong: str,
    cause: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(needs)
    monkeypatch.chdir(tmp_path)
    path = SCRIPTS / f"{script}.py"
    right = shoal.verify_script(path, ["right"], ranks=2)
    assert right.verdict == "exact", str(right)
    report = shoal.verify_script(path, [wrong], ranks=2)
    assert (report.verdict, report.cause.kind) == ("differs", cause), str(report)
