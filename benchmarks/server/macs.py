"""What authentication costs between machines: one way over loopback in frames of 4 MiB, by turns; prints a table.

sender   [header, its MAC][payload][its MAC] ──> receiver         with and without either MAC, and a plain socket
"""

from __future__ import annotations

import os
import random
import socket
import time
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import quantiles

from benchmarks.page import circumstances, table, told
from benchmarks.server.wire import fill
from shoal.server.channel import Channel
from shoal.server.frame import Header
from shoal.server.handshake import Session
from shoal.server.mac import GMAC, HMAC, known

FRAME_BYTES, FRAMES, TURNS = 4 << 20, 64, 9
SENDS = Session(send_key=b"a" * 32, receive_key=b"b" * 32)
RECEIVES = Session(send_key=b"b" * 32, receive_key=b"a" * 32)
KINDS = {"plain socket": None, "headers authenticated": (False, HMAC), "payloads too, HMAC-SHA256": (True, HMAC)}


def receive(kind: tuple[bool, int] | None, sock: socket.socket, done: Connection) -> None:
    """Be the other end until the first has gone."""
    memory = memoryview(bytearray(FRAME_BYTES))
    channel = None if kind is None else _channel(sock, RECEIVES, kind)
    for _ in range(FRAMES):
        if channel is None:
            fill(sock, memory)
        else:
            channel.receive(lambda _: memory)
    done.send(None)


def turn(kind: tuple[bool, int] | None) -> tuple[float, float]:
    """GB/s, and seconds of a core that a gigabyte takes the sender."""
    context = get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    heard, done = context.Pipe(duplex=False)
    process = context.Process(target=receive, args=(kind, theirs, done))
    process.start()
    theirs.close()
    payload = memoryview(os.urandom(FRAME_BYTES))
    channel = None if kind is None else _channel(ours, SENDS, kind)
    begun_s, core_s = time.perf_counter(), time.process_time()
    for _ in range(FRAMES):
        if channel is None:
            ours.sendall(payload)
        else:
            channel.send(Header(op=1), payload)
    spent_s = time.process_time() - core_s
    heard.recv()
    taken_s = time.perf_counter() - begun_s
    process.join()
    ours.close()
    return FRAMES * FRAME_BYTES / taken_s / 1e9, spent_s / (FRAMES * FRAME_BYTES / 1e9)


def main() -> None:
    kinds = KINDS | ({"payloads too, AES-256-GMAC": (True, GMAC)} if known() & GMAC else {})
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    facts, chance = circumstances(("torch",)), random.Random(0)
    for _ in range(TURNS):
        for name in chance.sample(list(kinds), len(kinds)):
            found[name].append(turn(kinds[name]))
    rows = [[name, _spread([r for r, _ in turns]), _spread([c for _, c in turns])] for name, turns in found.items()]
    print(table(["one way, frames of 4 MiB, 9 turns", "GB/s (quartiles)", "s of the sender's core a GB"], rows))
    print(told(facts))


def _spread(values: list[float]) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _channel(sock: socket.socket, session: Session, kind: tuple[bool, int]) -> Channel:
    authenticates, mac = kind
    named = replace(session, mac=mac)
    return Channel(sock, named, authenticate_payload=authenticates, limit_bytes=FRAME_BYTES)


if __name__ == "__main__":
    main()
