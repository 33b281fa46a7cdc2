"""Pickles are read, never run."""

import contextlib
import os
import pickle
import pickletools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import restricted_unpickler

BATCH = {
    "data": np.arange(12, dtype=np.uint8).reshape(2, 6),
    "labels": [3, 7],
    "filenames": [b"a.png", "b.png"],
}


class Command:
    """Unpickled by the usual means, this runs a program."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_in_a_dict_is_read_whatever_the_protocol(protocol, order):
    found = restricted_unpickler.read(
        pickle.dumps(BATCH | {"data": np.array(BATCH["data"], order=order)}, protocol)
    )
    assert found["labels"] == [3, 7]
    assert [bytes(name) if isinstance(name, bytes) else name for name in found["filenames"]] == [
        b"a.png",
        "b.png",
    ]
    assert np.array_equal(found["data"].numpy(), BATCH["data"])


def test_a_command_is_refused_by_its_name_and_not_run(tmp_path):
    trace = tmp_path / "ran"
    content = pickle.dumps({"data": Command(f"touch {trace}")})
    assert b"system" in content
    with pytest.raises(
        ValueError, match=r"it asks for posix\.system, which has no place in it; nothing was run"
    ):
        restricted_unpickler.read(content)
    assert not trace.exists()
    # The content is one that would have run.
    pickle.loads(content)
    assert trace.exists()


@pytest.mark.parametrize(
    "name",
    [
        "builtins eval",
        "builtins getattr",
        "numpy load",
        "numpy.core.multiarray fromfile",
        "os system",
        "numpy dtype.type",
    ],
)
def test_every_other_name_is_refused(name):
    content = b"c" + name.replace(" ", "\n").encode() + b"\n."
    with pytest.raises(ValueError, match="it asks for " + name.replace(" ", r"\.")):
        restricted_unpickler.read(content)
    module, attribute = name.split()
    framed = (
        b"\x80\x04"
        + b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, attribute))
        + b"\x93."
    )
    with pytest.raises(ValueError, match="it asks for"):
        restricted_unpickler.read(framed)


def test_an_array_of_anything_else_than_bytes_is_refused():
    for array in (np.zeros(3), np.array([Command("true")], dtype=object)):
        with pytest.raises(ValueError, match=r"only bytes, 'u1', belong here|it asks for"):
            restricted_unpickler.read(pickle.dumps(array))


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_pickle_is_a_value_error_and_nothing_else(data):
    content = bytearray(pickle.dumps(BATCH, 4))
    # Opcodes that take a size or an index could ask for gigabytes; they stay, and everything behind
    # them may change.
    fixed = {
        position
        for opcode, _, position in pickletools.genops(bytes(content))
        if opcode.name == "FRAME"
    }
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        if place not in fixed and content[place] not in b"jr":
            content[place] = data.draw(st.sampled_from(sorted(set(bytes(content)) - set(b"jr"))))
    del content[data.draw(st.integers(1, len(content))) :]
    with contextlib.suppress(ValueError):
        restricted_unpickler.read(bytes(content))
