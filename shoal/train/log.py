"""What a run writes down and says outside its progress: by rank 0 alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import UsageError
from shoal.train.console import print_rank_zero, say_summary, warn
from shoal.train.metrics_file import NAME, MetricsFile, Record

if TYPE_CHECKING:
    from shoal.train.tensorboard_events import Events


class Log:
    """The records of one run: metrics.jsonl (see metrics_file.py) and TensorBoard events.

    Args: directory: the run directory; made if it is not there. active: whether this rank writes
        and prints; on the others every method does nothing. tensorboard: write TensorBoard events
        too, in directory/tensorboard. resume_step: last step that counts, 0 for a new run; what was
        written about later steps is taken back.

    Raises: UsageError: the directory cannot be written. A disk that fills up later does not end
        training: it is said once
            on stderr, and whole records are left out until there is room again.
    """

    def __init__(
        self, directory: Path, *, active: bool, tensorboard: bool, resume_step: int
    ) -> None:
        self._active = active
        self._files: list[MetricsFile | Events] = []
        self._complained = False
        if not active:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._files.append(MetricsFile(directory / NAME, resume_step))
        except OSError as error:
            raise UsageError(
                f"{directory / NAME} cannot be written: {error.strerror}. Give another --out."
            ) from error
        if tensorboard:
            self._open_events(directory / "tensorboard", resume_step)

    def header(self, lines: Sequence[str]) -> None:
        """Says what kind of run this is, e.g. `global batch 256 = 8 ranks x 16 x 2 accumulated`."""
        if self._active:
            print_rank_zero("\n".join(lines))

    def step(self, record: Record) -> None:
        """Writes what an optimizer step measured: `step` at least. Records come in the order of
        their steps.
        """
        self._write("train", record)

    def evaluation(self, record: Record) -> None:
        """Writes what the evaluation after step `record["step"]` measured."""
        self._write("validation", record)

    def note(self, text: str) -> None:
        """Says on stderr what the user should know."""
        if self._active:
            warn(text)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Closes the files and prints the closing table (see closing.py); a run that was
        stopped has no summary.
        """
        for file in self._files:
            file.close()
        self._files.clear()
        if self._active and summary is not None:
            say_summary(summary)

    def _open_events(self, directory: Path, resume_step: int) -> None:
        try:
            from shoal.train.tensorboard_events import Events

            self._files.append(Events(directory, resume_step))
        except ImportError:
            self.note(
                "no TensorBoard events are written: tensorboard is not installed. Cure: pip "
                "install tensorboard"
            )
        except OSError as error:
            self._complain(error)

    def _write(self, kind: str, record: Record) -> None:
        for file in self._files:
            try:
                file.write(kind, record)
            except OSError as error:
                self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            self.note(
                f"the log is losing records ({error.strerror}); training goes on. Make room on the "
                "disk."
            )
