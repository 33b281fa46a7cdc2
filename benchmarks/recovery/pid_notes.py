"""`--plugin pid_notes.py`: each rank leaves its process id in the directory NOTES; rank 0 those of
the parameter servers too.
"""

import os
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from shoal.parameter_server import launcher

FOLDER = Path(os.environ["NOTES"])
begin = launcher.ServerPool.__init__
pools: list[Any] = []


def remember(pool: Any, *args: Any, **kwargs: Any) -> None:
    pools.append(pool)
    begin(pool, *args, **kwargs)


def note_server(*_: object) -> None:
    """Note a server of shard 0, once there are steps and so servers."""
    path = FOLDER / "server"
    if pools and not path.exists():
        servers = pools[0].servers.items()
        path.write_text(str(min(pid for pid, config in servers if config.shard == 0)))


launcher.ServerPool.__init__ = remember  # type: ignore[method-assign]
register_optimizer_step_post_hook(note_server)
(FOLDER / os.environ["RANK"]).write_text(str(os.getpid()))
data: dict[str, object] = {}
