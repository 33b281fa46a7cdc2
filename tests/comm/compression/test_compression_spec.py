"""Compression specs, and the errors for wrong ones."""

import pytest

from shoal.comm.compression import parse
from shoal.comm.compression.half import Bf16, Fp16
from shoal.comm.compression.onebit import OneBit
from shoal.comm.compression.topk import TopK
from shoal.errors import ConfigError


def test_names_are_parsed() -> None:
    assert parse("none") is None
    assert (parse("bf16"), parse("fp16"), parse("onebit")) == (Bf16(), Fp16(), OneBit())
    assert (parse("topk=0.01"), parse("topk=1e-3"), parse("topk=.5")) == (
        TopK(0.01),
        TopK(0.001),
        TopK(0.5),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "compression '' is not known; known: bf16, fp16, none, onebit, topk"),
        ("int8", "compression 'int8' is not known; known: "),
        ("BF16", "'BF16' is not known; did you mean 'bf16'"),
        ("top-k=0.01", "'top-k=0.01' is not known; did you mean 'topk'"),
        ("bf16=2", "'bf16=2': bf16 takes no value; write 'bf16'"),
        ("none=", "'none=': none takes no value; write 'none'"),
        ("topk", "'topk': topk needs the fraction of the numbers that is sent, as in topk=0.01"),
        ("topk=1%", "topk needs the fraction"),
        ("topk=0", "'topk=0': the fraction must be above 0 and at most 0.5"),
        ("topk=0.51", "at most 0.5; an index of 4 bytes goes with each number"),
        ("topk=nan", "must be above 0"),
        ("topk=inf", "at most 0.5"),
        (
            "powersgd=4",
            "servers take topk=FRACTION, none, bf16, fp16, onebit; ddp takes powersgd=RANK",
        ),
        ("powersgd", "products are means over ranks, and a server sums the gradients of each"),
    ],
)
def test_what_is_no_compression_is_named_with_its_cure(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(text)
    assert message in str(refusal.value)
