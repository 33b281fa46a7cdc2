"""Spans of pushes and pulls for the trace of one worker."""

from __future__ import annotations

from shoal.trace.recorder import InFlight, Recorder


class PushTrace:
    """Record push, arrival and waiting time of each partition.

    Args:
        recorder: of this rank; nothing is recorded until it is turned on.
        awaited: ranks whose gradients a step waits for.
    """

    def __init__(self, recorder: Recorder | None = None, awaited: tuple[int, ...] = ()) -> None:
        self._recorder = recorder or Recorder()
        self._awaited = awaited
        self._flights: dict[int, InFlight] = {}

    @property
    def on(self) -> bool:
        """Return True while the recorder is on."""
        return self._recorder.on

    def now(self) -> int:
        """Return the time on the recorder's clock, in nanoseconds."""
        return self._recorder.now()

    def pushed(self, partition: int, size_bytes: int) -> None:
        """Record the push of a gradient."""
        if self._recorder.on:
            self._flights[partition] = self._recorder.start(
                f"push and pull part {partition}", size_bytes, f"part {partition}", self._awaited
            )

    def arrived(self, partition: int) -> None:
        """Record the arrival of the partition's values."""
        if partition in self._flights:
            self._flights[partition].finish()

    def waited(self, partition: int, begun_ns: int) -> None:
        """Record that the calling thread has waited for values until now."""
        if partition in self._flights:
            self._recorder.blocked(self._flights[partition], begun_ns)
