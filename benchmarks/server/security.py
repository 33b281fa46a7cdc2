"""Throughput of the ways to protect a connection: one way over loopback, by turns; prints tables.

    sender process ──> receiver process     plain socket; frames with each MAC; TLS 1.3

Each way keeps two processes for the whole measurement. In a round every way takes one turn, in an
order of chance, so a ratio compares neighbours in time. TLS is measured twice: by `ssl.SSLSocket`,
whose every record is a system call, and by memory BIOs, which let 256 KiB of records go by one.
Both ends hold the certificate of the job, as mutual TLS needs.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import random
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Protocol

from benchmarks.report_page import circumstances, table, told
from shoal.parameter_server.transport.frame import HEADER_BYTES, Header
from shoal.parameter_server.transport.handshake import Session
from shoal.parameter_server.transport.mac import GMAC, HMAC, supported_macs
from shoal.parameter_server.transport.secure_channel import SecureChannel

KIB = 1 << 10
FRAMES_BYTES = (256 * KIB, 1024 * KIB, 4096 * KIB)
TURN_BYTES = 64 << 20
CHUNK_BYTES = 256 * KIB
SENDS = Session(send_key=b"a" * 32, receive_key=b"b" * 32)
RECEIVES = Session(send_key=b"b" * 32, receive_key=b"a" * 32)
AES_128, AES_256 = "TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384"
MAKE_CERTIFICATE = (
    "openssl req -x509 -newkey rsa:3072 -nodes -days 1 -subj /CN=shoal "
    "-keyout job.pem -out crt.pem && cat crt.pem >> job.pem"
)


class End(Protocol):
    """One end of a protected connection."""

    def send(self, payload: memoryview) -> None:
        """Send a frame."""

    def receive(self, memory: memoryview) -> None:
        """Receive a frame whose payload fills `memory`."""


class PlainEnd:
    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.header = sock, memoryview(bytearray(HEADER_BYTES))

    def send(self, payload: memoryview) -> None:
        self.sock.sendall(self.header)
        self.sock.sendall(payload)

    def receive(self, memory: memoryview) -> None:
        for part in (self.header, memory):
            self.sock.recv_into(part, len(part), socket.MSG_WAITALL)


class ChannelEnd:
    def __init__(self, sock: socket.socket, sends: bool, authenticates: bool, mac: int) -> None:
        session = replace(SENDS if sends else RECEIVES, mac=mac)
        limit_bytes = max(FRAMES_BYTES)
        self.channel = SecureChannel(
            sock,
            session,
            authenticate_payload=authenticates,
            limit_bytes=limit_bytes,
        )

    def send(self, payload: memoryview) -> None:
        self.channel.send(Header(op=1), payload)

    def receive(self, memory: memoryview) -> None:
        self.channel.receive(lambda _: memory)


class TlsSocketEnd:
    def __init__(self, sock: socket.socket, sends: bool, cipher: str, certificate: Path) -> None:
        made = context(certificate, server_side=not sends)
        self.sock = made.wrap_socket(sock, server_side=not sends)
        refuse_other_cipher(self.sock.cipher(), cipher)
        self.header = memoryview(bytearray(HEADER_BYTES))

    def send(self, payload: memoryview) -> None:
        self.sock.sendall(self.header)
        self.sock.sendall(payload)

    def receive(self, memory: memoryview) -> None:
        for part in (self.header, memory):
            while part:
                part = part[self.sock.recv_into(part) :]


class TlsMemoryEnd:
    def __init__(self, sock: socket.socket, sends: bool, cipher: str, certificate: Path) -> None:
        self.sock, self.coming, self.going = sock, ssl.MemoryBIO(), ssl.MemoryBIO()
        made = context(certificate, server_side=not sends)
        self.tls = made.wrap_bio(self.coming, self.going, server_side=not sends)
        self.chunk = memoryview(bytearray(CHUNK_BYTES))
        self.header = memoryview(bytearray(HEADER_BYTES))
        self._do(self.tls.do_handshake)
        if sends:
            self._do(lambda: self.tls.read(1))  # the server's tickets come before its first byte
        else:
            self.tls.write(b"\n")
            self._flush()
        refuse_other_cipher(self.tls.cipher(), cipher)

    def send(self, payload: memoryview) -> None:
        self.tls.write(self.header)
        for start in range(0, len(payload), CHUNK_BYTES):
            chunk = payload[start : start + CHUNK_BYTES]
            while chunk:
                chunk = chunk[self.tls.write(chunk) :]
            self._flush()

    def receive(self, memory: memoryview) -> None:
        for part in (self.header, memory):
            while part:
                part = part[self._do(lambda left=part: self.tls.read(len(left), left)) :]

    def _do(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                done = call()
            except ssl.SSLWantReadError:
                self._flush()
                count = self.sock.recv_into(self.chunk)
                if not count:
                    raise ConnectionResetError("the peer has hung up") from None
                self.coming.write(self.chunk[:count])
            else:
                self._flush()
                return done

    def _flush(self) -> None:
        if self.going.pending:
            self.sock.sendall(self.going.read())


def context(certificate: Path, server_side: bool) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_cert_chain(certificate)
    made.load_verify_locations(certificate)
    return made


def refuse_other_cipher(found: tuple[str, str, int] | None, wanted: str) -> None:
    if found is None or found[0] != wanted:
        raise AssertionError(f"TLS took {found}, not {wanted}")


Make = Callable[[socket.socket, bool], End]


class Way:
    """Two processes that send and receive in one way, turn by turn."""

    def __init__(self, make: Make, openssl_conf: Path | None) -> None:
        spawned = multiprocessing.get_context("spawn")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        self.pipes: list[Connection] = []
        self.processes = []
        # Before Python 3.15 nothing else names the ciphers of TLS 1.3.
        if openssl_conf is not None:
            os.environ["OPENSSL_CONF"] = str(openssl_conf)
        for sock, sends in ((ours, True), (theirs, False)):
            here, there = spawned.Pipe()
            process = spawned.Process(target=_live, args=(make, sock, sends, there), daemon=True)
            process.start()
            sock.close()
            self.pipes.append(here)
            self.processes.append(process)
        os.environ.pop("OPENSSL_CONF", None)
        for pipe in self.pipes:
            assert pipe.recv() == "ready"

    def turn(self, frame_bytes: int) -> tuple[float, float]:
        """GB/s, and seconds of the sender's core that a gigabyte takes."""
        begun_s = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(frame_bytes)
        core_s = self.pipes[0].recv()
        self.pipes[1].recv()
        gigabytes = TURN_BYTES / 1e9
        return gigabytes / (time.perf_counter() - begun_s), core_s / gigabytes

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _live(make: Make, sock: socket.socket, sends: bool, pipe: Connection) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end = make(sock, sends)
    memory = memoryview(bytearray(os.urandom(max(FRAMES_BYTES))))
    pipe.send("ready")
    while True:
        frame_bytes = pipe.recv()
        begun_s, frame = time.process_time(), memory[:frame_bytes]
        for _ in range(TURN_BYTES // frame_bytes):
            (end.send if sends else end.receive)(frame)
        pipe.send(time.process_time() - begun_s)


def _plain(sock: socket.socket, _: bool) -> End:
    return PlainEnd(sock)


def _framed(authenticates: bool, mac: int, sock: socket.socket, sends: bool) -> End:
    return ChannelEnd(sock, sends, authenticates, mac)


def _tls(by_socket: bool, cipher: str, certificate: Path, sock: socket.socket, sends: bool) -> End:
    return (TlsSocketEnd if by_socket else TlsMemoryEnd)(sock, sends, cipher, certificate)


def ways(folder: Path) -> dict[str, Way]:
    """Start all of them."""
    subprocess.run(MAKE_CERTIFICATE, shell=True, cwd=folder, check=True, capture_output=True)
    made = {
        "plain socket": Way(_plain, None),
        "headers authenticated": Way(functools.partial(_framed, False, HMAC), None),
        "payloads too, HMAC-SHA256": Way(functools.partial(_framed, True, HMAC), None),
    }
    if supported_macs() & GMAC:
        framed = functools.partial(_framed, True, GMAC)
        made["payloads too, AES-256-GMAC"] = Way(framed, None)
    for cipher in (AES_128, AES_256):
        conf = folder / f"{cipher}.cnf"
        conf.write_text(
            "openssl_conf = init\n[init]\nssl_conf = modules\n[modules]\nsystem_default = tls\n"
            f"[tls]\nCiphersuites = {cipher}\n"
        )
        name = "AES-128-GCM" if cipher == AES_128 else "AES-256-GCM"
        for by_socket, how in ((True, "SSLSocket"), (False, "memory BIO")):
            make = functools.partial(_tls, by_socket, cipher, folder / "job.pem")
            made[f"TLS 1.3, {name}, {how}"] = Way(make, conf)
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    packages = ("torch", "cryptography") if supported_macs() & GMAC else ("torch",)
    facts, chance = circumstances(packages), random.Random(0)
    facts["versions"] += f", {ssl.OPENSSL_VERSION}"
    with tempfile.TemporaryDirectory() as folder:
        running = ways(Path(folder))
        found: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for number in range(rounds + 1):
            for frame_bytes in FRAMES_BYTES:
                for name in chance.sample(list(running), len(running)):
                    turn = running[name].turn(frame_bytes)
                    if number:  # the first warms up
                        found.setdefault((frame_bytes, name), []).append(turn)
        for way in running.values():
            way.close()
    yardstick = f"payloads too, {'AES-256-GMAC' if supported_macs() & GMAC else 'HMAC-SHA256'}"
    for frame_bytes in FRAMES_BYTES:
        best = found[frame_bytes, yardstick]
        rows = [[name, *_columns(found[frame_bytes, name], best)] for name in running]
        head = f"one way, frames of {frame_bytes // KIB} KiB, {rounds} rounds"
        core = "s of the sender's core a GB"
        print(table([head, "GB/s (quartiles)", f"of {yardstick.split()[-1]}", core], rows))
        print()
    print(told(facts))


def _columns(turns: list[tuple[float, float]], yardstick: list[tuple[float, float]]) -> list[str]:
    low, middle, high = quantiles([rate for rate, _ in turns], n=4)
    ratio = median(ours / theirs for (ours, _), (theirs, _) in zip(turns, yardstick, strict=True))
    core_s = median(core for _, core in turns)
    return [f"{middle:.2f} ({low:.2f} to {high:.2f})", f"{ratio:.2f}", f"{core_s:.2f}"]


if __name__ == "__main__":
    main()
