from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config import Job, builtin_names, explain, read, to_yaml
from shoal.config.fields import all_settings, build
from shoal.config.job import OptimizerConfig
from shoal.config.read import violations

words = st.text(max_size=12)
anything = (
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False) | words
)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-1, 300),
    float: st.floats(-1, 3),
    str: words,
    dict[str, Any]: st.dictionaries(
        st.sampled_from(["width", "betas", "eps"]), anything | st.lists(anything, max_size=3)
    ),
}


def of_type(annotation: Any) -> st.SearchStrategy[Any]:
    if annotation in BY_TYPE:
        return BY_TYPE[annotation]
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if get_origin(annotation) is tuple:
        return st.lists(of_type(get_args(annotation)[0]), max_size=4).map(tuple)
    return st.none() | of_type(get_args(annotation)[0])


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Draw a job with a few settings that are not defaults, and that break no rule."""
    values = {}
    for name in draw(st.lists(st.sampled_from(list(all_settings())), unique=True, max_size=12)):
        setting = all_settings()[name]
        value = draw(of_type(setting.annotation))
        if value is None or setting.check is None or setting.check[0](value):
            values[name] = value
    job = build(values)
    return job if not list(violations(job)) else Job()


@settings(max_examples=25)
@given(job=jobs())
def test_a_job_reads_back_from_its_yaml_as_it_was(
    job: Job, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "job.yaml"
    path.write_text(to_yaml(job), encoding="utf-8")
    assert read(path).job == job


def test_the_yaml_holds_every_setting_with_its_meaning() -> None:
    text = to_yaml(Job(optimizer=OptimizerConfig(lr=5e-5)))
    for setting in all_settings().values():
        assert f"# {setting.help}\n" in text
    assert "\noptimizer:                          # The optimizer and its options.\n" in text
    assert "\n  lr: 5.0e-05                       # learning rate for a batch" in text


def test_an_explanation_shows_value_origin_and_meaning_of_everything(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("optimizer:\n  lr: 0.3\n")
    text = explain(read(tmp_path / "mine.yaml", [("model.options.width", "64")]))
    lines = {
        line.split()[0]: line.split()[1:] for line in text.splitlines() if not line.startswith(" ")
    }
    assert lines["optimizer.lr"] == ["0.3", *f"{tmp_path}/mine.yaml:2".split()]
    assert lines["model.options.width"] == ["64", "flag", "--model.options.width"]
    assert lines["seed"] == ["0", "default"]
    assert "    from which every random number follows\n" in text
    assert set(all_settings()) - set(lines) == {"model.options"}


@pytest.mark.parametrize("name", builtin_names())
def test_an_explanation_fits_in_100_columns(name: str) -> None:
    settings = read(name, [("optimizer.decay_norm_and_bias", "false")])
    assert max(map(len, explain(settings).splitlines())) <= 100


def test_a_long_value_does_not_push_the_origins_of_others_away() -> None:
    settings = read(None)
    long = replace(
        settings, job=replace(settings.job, plugins=("a/long/path/to/some/file.py",) * 3)
    )
    assert f"seed{' ' * 27}0{' ' * 25}default" in explain(long)
