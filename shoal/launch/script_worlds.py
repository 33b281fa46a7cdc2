"""Refuse worlds that a launched script makes at an address, or in processes, of its own.

Under the launcher torch makes all ranks clients of a store that exists already (see
TORCHELASTIC_USE_AGENT_STORE). Nobody would serve another address, and the ranks would wait for
half an hour.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from shoal.errors import UsageError


def refuse_worlds_of_script(environment: Mapping[str, str]) -> None:
    """Let `init_process_group` of a rank meet in the launcher's store alone.

    Call it once, in a rank, after torch was imported. Without torch's store of the launcher it does
    nothing.

    Args:
        environment: the rank's variables.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    import torch.multiprocessing

    from shoal.platform.torch_private.url_rendezvous import replace_handler

    address = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    rank_pid = os.getpid()

    def refuse(asked: str) -> NoReturn:
        raise UsageError(
            f"{asked}: the launcher has started the script {environment['WORLD_SIZE']} times, and "
            f"its ranks meet at {address} only. Call init_process_group without init_method, leave "
            "MASTER_ADDR and MASTER_PORT as they are, and start no processes; or start the script "
            "once, with `python`"
        )

    def replaced(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def meet(url: str, **options: Any) -> Iterator[Any]:
            asked = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            if os.getpid() != rank_pid:
                refuse("init_process_group in a process that a rank has started")
            if url.startswith("tcp:"):
                refuse(f"init_method={url!r}")
            if asked != address:
                refuse(f"MASTER_ADDR and MASTER_PORT are {asked}")
            return original(url, **options)

        return meet

    for scheme in ("tcp", "env"):
        replace_handler(scheme, replaced)
    # A process that starts as a new interpreter has torch's own handlers again.
    processes: Any = torch.multiprocessing
    processes.spawn = lambda *_, **__: refuse("torch.multiprocessing.spawn")
