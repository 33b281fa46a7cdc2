"""Functions of torch that are replaced while models are prepared."""

import gc
from contextlib import ExitStack
from typing import Any

from shoal.run.guards.guarded_models import ProcessWidePatch


class Prepared:
    """Stands for prepared models."""


def test_models_that_are_gone_are_looked_at_no_more() -> None:
    events: list[str] = []

    def install(_: ProcessWidePatch) -> Any:
        events.append("replaced")
        return lambda: events.append("put back")

    patch = ProcessWidePatch(install)
    first: Any = Prepared()
    second: Any = Prepared()
    undo = ExitStack()
    patch.add(first, ExitStack())
    patch.add(first, ExitStack())
    patch.add(second, undo)
    assert {*patch.active} == {first, second}
    assert len(patch.active) == 2
    del first
    gc.collect()
    assert patch.active == [second]
    undo.close()
    assert (patch.active, events) == ([], ["replaced", "put back"])
