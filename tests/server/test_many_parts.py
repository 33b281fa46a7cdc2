"""A model of more parts than fit into a small message."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from pathlib import Path

from shaken import KEY

from shoal.server.arbitrate import Arbitration, Court
from shoal.server.key import Key
from shoal.server.messages import SMALL_BYTES, Op
from shoal.server.views import Views

PARTS = 60_000


def test_a_worker_hears_who_answers_for_each(tmp_path: Path) -> None:
    owners = tuple(number % 2 for number in range(PARTS))
    court = Court(owners, (4,) * PARTS, 2, 1, 1.0, "job", Key(KEY), tmp_path / "views.json")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arbiter = threading.Thread(target=Arbitration(court, listener).run, daemon=True)
        arbiter.start()
        with closing(Views(0, listener.getsockname(), Key(KEY), "job")) as views:
            views.begin()
            placement = views.placement(10)
            views.post(Op.BYE)
        arbiter.join(10)
    assert not arbiter.is_alive()
    assert placement is not None
    assert placement.owners == owners
    assert len(str(placement.to_json())) > SMALL_BYTES
