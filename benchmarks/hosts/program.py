"""How a measurement that makes network namespaces ends: whatever stops it, its contexts remove
them.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.errors import ShoalError


@contextmanager
def as_a_program() -> Iterator[None]:
    """Ends the process with a sentence for our own errors, with 130 for Ctrl-C and with 143 for
    SIGTERM.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    except ShoalError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
