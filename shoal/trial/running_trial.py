"""The trial that is running, if one is, for functions that must not run inside of one."""

from __future__ import annotations

from shoal.strategies.trial_passes import is_trial_running
from shoal.trial.loss_verdict import CannotTry


def end_trial() -> None:
    """End a trial if one is running; else do nothing. Nothing is announced.

    To be called first by functions that take part in communication, such as `run.gather`: whoever
    calls them knows that the samples of a batch influence one another.

    Raises: CannotTry: a trial is running.
    """
    if is_trial_running():
        raise CannotTry("")
