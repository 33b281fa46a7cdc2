"""Option values that fit no model and no world are errors when a text is parsed."""

import subprocess
import sys
from importlib import import_module

import own_strategies
import pytest

from shoal.errors import ConfigError
from shoal.strategies import STRATEGIES, build_strategies, parse_line

BAD = [
    ("pipeline=0", "pipeline=0, microbatches=1, stages=0: give whole positive numbers"),
    ("pipeline=2,schedule=zbx", "did you mean 'zbv'"),
    ("pipeline=2,schedule=naive,microbatches=4", "with several it is schedule=gpipe"),
    (
        "pipeline=4,schedule=interleaved,microbatches=9",
        "9 make no whole rounds; use microbatches=8 or 12",
    ),
    ("pipeline=2,microbatches=-1", "microbatches=-1: must not be negative"),
    ("pipeline=2,schedule=gpipe,stages=2", "stages=2 is for interleaved"),
    ("pipeline=2,cuts=layers.1/head", "2 names begin as many stages; 2 stages need 1"),
    ("pipeline=2,schedule=zbv,cuts=head", "1 names begin as many stages; 4 stages need 3"),
    ("pipeline=2,balance=luck", "by time or by parameters"),
    ("tensor=0", "tensor=0: must be 1 or more"),
    ("tensor=2,cut_by=up:column", "tensor=T,whole=PATTERN leaves modules whole"),
    ("recompute=0", "k from 1 on"),
    ("recompute,budget_mb=100", "recompute=K computes every K-th unit again"),
    ("ddp,bucket_mb=0", "bucket_mb=0: must be greater than 0"),
    ("ddp,allreduce=rnig", "allreduce=rnig: not known; did you mean 'ring'"),
    (
        "ddp,compress=zip",
        "compression 'zip' is not known; known: bf16, fp16, none, onebit, powersgd, topk",
    ),
    ("ddp,compress=powersgd=0", "powersgd needs the rank of its matrices"),
    ("ddp,unused=maybe", "unused must be true or false; it is 'maybe'"),
    ("zero1,hybrid=-2", "hybrid=-2: must not be negative"),
    ("zero3,allreduce=ring", "option 'allreduce' is not known; it belongs to ddp"),
    ("server=2,staleness", "'staleness' is an option, with a value: server,staleness=..."),
    ("ring", "a ring is an option of ddp: ddp,allreduce=ring"),
    ("pipeline=2,hybrid=2", "option 'hybrid' is not known; it belongs to zero1, zero2, zero3"),
    ("server=0", "at least one server"),
    ("server=2,replicas=0", "at least one of each shard"),
    ("server=2,encrypt=perhaps", "encrypt=perhaps"),
    ("server=2,staleness=soon", "staleness=soon: a number of steps"),
    ("server=2,compress=powersgd=4", "compression 'powersgd=4': its products are means over ranks"),
    ("server=2,part_mb=0", "part_mb=0.0: must be greater than 0"),
    ("server=2,lease_s=-1", "lease_s=-1.0: must be greater than 0"),
    ("local=0", "local=0: there must be at least one step between meetings"),
    ("diloco=0", "diloco=0: there must be at least one step between meetings"),
    ("diloco=2,outer_lr=0", "outer_lr=0.0: must be greater than 0"),
    ("diloco=2,outer_lr=.inf", "outer_lr=inf: must be greater than 0, and finite"),
    ("ddp,bucket_mb=.nan", "bucket_mb=nan: must be greater than 0, and finite"),
    ("diloco=2,outer_momentum=1.0", "outer_momentum=1.0: must be at least 0 and less than 1"),
    ("single=1", "single takes no value; it is '1'"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_value_is_refused_when_the_line_is_read(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_line(line)
    assert message in str(refused.value)


def test_all_bad_values_of_a_line_are_said_at_once() -> None:
    with pytest.raises(ConfigError, match="4 problems"):
        parse_line("tensor=0,pipeline=2,balance=luck,ddp,compress=zip,bucket_mb=0")


def test_reading_a_line_needs_no_torch() -> None:
    program = (
        "import sys, shoal.strategies as s\n"
        "s.parse_line(sys.argv[1])\n"
        "assert 'torch' not in sys.modules"
    )
    line = "tensor=2,pipeline=2,schedule=zbv,recompute,ddp,compress=bf16"
    subprocess.run([sys.executable, "-c", program, line], check=True)


def test_a_strategy_inherits_the_options_of_its_entry() -> None:
    for entry in STRATEGIES.values():
        file, _, name = entry.class_path.partition(":")
        strategy_class = getattr(import_module(f"shoal.strategies.{file}"), name)
        assert issubclass(strategy_class, entry.options)


def test_options_of_a_foreign_strategy_are_not_checked_before_its_import() -> None:
    line = parse_line("nowhere:Mine,some=thing")
    with pytest.raises(ConfigError, match="a strategy of one's own is MODULE:CLASS"):
        build_strategies(line)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WithoutBase", "derive the class from shoal.strategies.base.Strategy"),
        ("NOT_A_CLASS", "derive the class from shoal.strategies.base.Strategy"),
        ("WithoutApply", "own_strategies:WithoutApply lacks apply"),
    ],
)
def test_a_class_that_is_no_strategy_is_refused_before_anything_is_done(
    name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_strategies(parse_line(f"own_strategies:{name}"))


def test_a_strategy_of_ones_own_gets_the_options_of_its_line() -> None:
    (made,) = build_strategies(parse_line("own_strategies:Mine=7,name=shad"))
    assert made == own_strategies.Mine(count=7, name="shad")
