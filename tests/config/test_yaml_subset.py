from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.yaml_subset import parse_file, parse_flag, plain_value, write
from shoal.errors import ConfigError

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


MEANINGS = {
    "numbers": {
        "5e-5": 5e-5,
        "1e3": 1000.0,
        ".5": 0.5,
        "1.": 1.0,
        "-2": -2,
        "1_000": 1000,
        "010": 10,
    },
    "words": {
        word: word for word in ("no", "on", "12:30", "2024-01-01", "nothing", "0x1f", "1e", "-")
    },
    "others": {
        "true": True,
        "False": False,
        "none": None,
        "None": None,
        "null": None,
        "~": None,
        "": None,
    },
}


@pytest.mark.parametrize("kind", MEANINGS)
def test_plain_words_mean_what_yaml_1_2_says(kind: str) -> None:
    for word, value in MEANINGS[kind].items():
        assert plain_value(word) == value
        assert type(plain_value(word)) is type(value)


@settings(max_examples=50)
@given(values)
def test_a_written_value_reads_back_as_it_was(value: object) -> None:
    line = write(value)
    assert "\n" not in line
    assert parse_file(f"key: {line}  # comment", "x.yaml")["key"].plain() == value


@given(scalars)
def test_other_yaml_readers_agree_on_what_was_written(value: object) -> None:
    assert yaml.safe_load(f"[{write(value)}]") == [value]


def test_values_know_their_lines() -> None:
    tree = parse_file("a: 1\n\nb:\n  c: [1, 2]  # here\n", "x.yaml")
    assert [tree["a"].origin, tree["b"].origin, tree["b"].value["c"].origin] == [
        f"x.yaml:{line}" for line in (1, 3, 4)
    ]


def test_an_empty_file_sets_nothing() -> None:
    assert parse_file("# only a comment\n", "x.yaml") == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3: 'a' stands twice, on line 1 too; remove one"),
        (
            "a: 1\nb: !!python/object:os.system {}\n",
            "x.yaml:2: tags (`!...`) are refused; write the plain value",
        ),
        ("a: !!int 3\n", "x.yaml:1: tags (`!...`) are refused; write the plain value"),
        ("a: 1\nb: [1, 2\n", "x.yaml:3: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n? [b]\n: 2\n", "x.yaml:2: a key must be a word, not a list or a mapping"),
        ("- a\n- b\n", "x.yaml:1: a configuration is a mapping (`key: value`), not [a, b]"),
        (
            "a: &sizes [1, 2]\nb: *sizes\n",
            "x.yaml:2: aliases (`*...`) are refused; write out what is meant",
        ),
        ("a: 1\n---\nb: 2\n", "x.yaml:2: not YAML: but found another document"),
        ("a: \0\n", "x.yaml:1: not YAML: special characters are not allowed"),
    ],
)
def test_what_is_not_the_dialect_is_refused_with_its_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_file(text, "x.yaml")
    assert list(error.value.problems) == [problem]


def test_tags_run_nothing(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    with pytest.raises(ConfigError):
        parse_file(f"a: !!python/object/apply:pathlib.Path.touch [{witness}]", "x.yaml")
    assert not witness.exists()


FLAGS = {
    "flow style": {"[30, 60]": [30, 60], "{width: 64}": {"width": 64}, "'3'": "3", '"a b"': "a b"},
    "one word": {
        "0.1": 0.1,
        "run: 1": "run: 1",
        "# 3": "# 3",
        "*": "*",
        "~/data": "~/data",
        "": None,
        "a, b": "a, b",
    },
}


@pytest.mark.parametrize("kind", FLAGS)
def test_a_flag_is_one_word_or_in_flow_style(kind: str) -> None:
    for text, value in FLAGS[kind].items():
        assert parse_flag(text, "flag --x").plain() == value


def test_a_flag_whose_brackets_do_not_close_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"flag --x: not YAML"):
        parse_flag("[1, 2", "flag --x")
