"""The progress of a script's loop: a bar on a terminal, plain lines elsewhere.

step 120/345 ━━━━━━━━━━╺━━━━━━━━━━━━━━  loss 0.1234  812 samples/s
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from shoal.data.tree_map import tensors_in
from shoal.platform.terminal import REFRESH_S, line_interval_s, on_terminal, open_live

COLUMNS = 30
"""Width of the bar."""


class LoopProgress:
    """The display of one loop over a loader, on one rank.

    Args:
        loader: batches; a prepared loader counts the samples of all ranks, and begins where a run
            goes on.
        logged: returns the last record of `run.log`; empty without one.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        logged: Callable[[], Mapping[str, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loader = loader
        self._logged = logged
        self._clock = clock

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the loader."""
        self._begin()
        start_s = next_s = self._clock()
        live = open_live() if on_terminal(sys.stdout) else None
        try:
            for batch in self._loader:
                yield batch
                now_s = self._clock()
                self._count(batch, now_s)
                if now_s < next_s:
                    continue
                if live is None:
                    next_s = now_s + line_interval_s(now_s - start_s)
                    print(self._line(""), flush=True)
                else:
                    next_s = now_s + REFRESH_S
                    with suppress(OSError):
                        live.update(self._line(self._bar()), refresh=True)
        finally:
            if live is not None:
                with suppress(OSError):
                    live.stop()
        print(self._line(""), flush=True)

    def _begin(self) -> None:
        self._steps: int | None = None
        with suppress(TypeError):
            self._steps = len(self._loader)  # type: ignore[arg-type]
        position = getattr(self._loader, "position", 0)
        self._step = position // (getattr(self._loader, "batch_size", None) or 1)
        self._samples = 0
        # Time at the end of the first step, which compiles and allocates.
        self._measured_from_s: float | None = None

    def _count(self, batch: Any, now_s: float) -> None:
        self._step += 1
        if self._measured_from_s is None:
            self._measured_from_s = now_s
            return
        share = getattr(self._loader, "share", None)
        first = next(iter(tensors_in(batch)), ())
        self._samples += len(first) if share is None else share.global_rows

    def _line(self, bar: str) -> str:
        """Return the place in the loop, the loss that was logged last, and the speed."""
        of = "" if self._steps is None else f"/{self._steps}"
        words = [f"step {self._step}{of}", *([bar] if bar else [])]
        if "loss" in (record := self._logged()):
            words.append(f"loss {record['loss']:.4f}")
        if self._samples and self._measured_from_s is not None:
            passed_s = max(self._clock() - self._measured_from_s, 1e-9)
            words.append(f"{self._samples / passed_s:,.0f} samples/s")
        return "  ".join(words)

    def _bar(self) -> str:
        if not self._steps:
            return ""
        done = min(COLUMNS, COLUMNS * self._step // self._steps)
        return "━" * done + "╌" * (COLUMNS - done)
