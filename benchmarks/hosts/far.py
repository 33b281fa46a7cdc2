"""Two hosts that are far from each other: a program between them holds every frame for a while, as `tc ... netem` does
where the kernel has it.

      host 10.77.0.1 ── eth0 ── holds each frame so many ms ── eth0 ── host 10.77.0.2
                 tbf: Mbit/s                            tbf: Mbit/s

Frames keep their order, and none is lost here. What TCP hands over at once, up to 64 KiB, stays one frame.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import select
import struct
import time
from collections import deque
from collections.abc import Iterator

from .network import BURST, LATENCY, add, address, end_with_parent, namespaces, run

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR, TUN_F_CSUM, TUN_F_TSO4 = 0x2, 0x1000, 0x4000, 0x1, 0x2
FRAME_BYTES = 70_000


@contextlib.contextmanager
def two_hosts(rate_mbit: int, delay_s: float, window_bytes: int | None = None) -> Iterator[None]:
    """Hosts 1 and 2; removed at the end.

    Args:
        rate_mbit: in each direction.
        delay_s: from one to the other; there and back is twice that.
        window_bytes: the most that TCP's buffers grow to; what the system has by default where None.

    Raises: UsageError: not root, or no iproute2.
    """
    with namespaces():
        ends = [_cable(host, rate_mbit, window_bytes) for host in (1, 2)]
        between = multiprocessing.get_context("fork").Process(target=_carry, args=(*ends, delay_s), daemon=True)
        between.start()
        for end in ends:
            os.close(end)
        try:
            yield
        finally:
            between.kill()
            between.join()


def _cable(host: int, rate_mbit: int, window_bytes: int | None) -> int:
    """A host, and the other end of its cable."""
    name, device = add(host), f"far{os.getpid()}-{host}"
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH14x", device.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(end, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    run(f"ip link set {device} netns {name} name eth0")
    run(f"ip -n {name} addr add {address(host)}/24 dev eth0")
    run(f"ip -n {name} link set eth0 up")
    run(f"tc -n {name} qdisc add dev eth0 root tbf rate {rate_mbit}mbit burst {BURST} latency {LATENCY}")
    for buffer in ("rmem", "wmem") if window_bytes is not None else ():
        run(f"ip netns exec {name} sysctl -qw", f"net.ipv4.tcp_{buffer}=4096 65536 {window_bytes}")
    return end


def _carry(one: int, other: int, delay_s: float) -> None:
    """Pass on every frame, some time after it came; until it is ended."""
    end_with_parent()
    waiting = deque[tuple[float, int, bytes]]()
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select([one, other], [], [], left_s)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame = os.read(end, FRAME_BYTES)
                    waiting.append((time.monotonic() + delay_s, other if end == one else one, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # a host that is not up takes nothing
                os.write(end, frame)
