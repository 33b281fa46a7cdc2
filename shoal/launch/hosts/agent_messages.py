"""Messages between a driver and an agent: one JSON object a line, with the kind under "do".

Text of ranks need not be Unicode, so what cannot be encoded is written out. Unknown keys are
ignored, which lets both sides grow; an unknown kind is an error, for nobody would answer it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shoal.errors import WireError

Message = Mapping[str, Any]

MAX_LINE_BYTES = 1 << 22
"""The longest is a look at the ranks of a host, about 1 KB each."""
MARKER = "SHOAL-AGENT"
"""The agent's first line is this word, the version of the protocol, and a random number."""
MAX_TEXT = 8_000
"""The most characters of output or of a traceback in one message."""


def encode(do: str, **values: Any) -> bytes:
    """Return one line.

    Raises:
        WireError: it is longer than MAX_LINE_BYTES.
    """
    text = json.dumps({"do": do, **values}, ensure_ascii=False, separators=(",", ":"))
    line = text.encode(errors="backslashreplace") + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise WireError(
            f"a message '{do}' of {len(line)} bytes; the longest that an agent takes has "
            f"{MAX_LINE_BYTES}."
        )
    return line


class MessageReader:
    """Collects bytes into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are complete with `data`.

        Raises:
            WireError: a line is too long, or is no JSON object with a kind.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if any(len(line) > MAX_LINE_BYTES for line in (*lines, self._rest)):
            raise WireError(f"a line has more than {MAX_LINE_BYTES} bytes.")
        return [_decode(line) for line in lines if line]


def _decode(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a line is no JSON: {line[:80]!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("do"), str):
        raise WireError(f"a line is no message: {line[:80]!r}")
    return message


def shortened(text: str) -> str:
    """Return `text` with its middle left out where it is too long for one message."""
    if len(text) <= MAX_TEXT:
        return text
    head = MAX_TEXT // 4
    return f"{text[:head]}\n... (shortened) ...\n{text[-(MAX_TEXT - head - 30) :]}"
