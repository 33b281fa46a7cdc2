"""The addresses of this machine's network interfaces, and their families."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

IFF_UP = 0x1
# Linux has the family as a 16-bit number; BSD and macOS have a length byte before an 8-bit one.
FAMILY_OFFSET, FAMILY_BYTES = (0, 2) if sys.platform == "linux" else (1, 1)
ADDRESS_OF_FAMILY = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}  # offset, bytes


class _InterfaceAddress(ctypes.Structure):
    """The beginning of `struct ifaddrs`, which is the same on Linux, BSD and macOS."""


_InterfaceAddress._fields_ = [
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("mask", ctypes.c_void_p),
]


@dataclass(frozen=True)
class HostAddress:
    """One address of a host.

    Args:
        interface: the network interface that has it.
        address: IPv4 or IPv6, without a scope.
        prefix: bits of the address that are its network.
    """

    interface: str
    address: str
    prefix: int


def addresses_that_are_up() -> list[HostAddress]:
    """Return all addresses of interfaces that are up, in the order of the system.

    Raises:
        OSError: the system does not tell them.
    """
    library = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if library.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        return list(_addresses(first))
    finally:
        library.freeifaddrs(first)


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of an IP address: AF_INET6 or AF_INET."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def own_address_towards(host: str) -> str:
    """Return the IP address of this machine from which packets to `host` would go.

    Of a name with addresses of both families, IPv4 is taken where there is a route to it.

    Args:
        host: a name, or an IPv4 or IPv6 address.

    Raises:
        OSError: the name has no address, or no route leads to any of them.
    """
    found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    problem = OSError(f"{host} has neither an IPv4 nor an IPv6 address")
    for family in (socket.AF_INET, socket.AF_INET6):
        for place in (entry[4] for entry in found if entry[0] == family):
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    # UDP sends nothing here. The system only chooses the interface.
                    probe.connect(place)
                    return str(probe.getsockname()[0])
            except OSError as error:
                problem = error
    raise problem


def _addresses(entry: Any) -> Iterator[HostAddress]:
    """Yield the addresses of a linked list, from the one to which `entry` points."""
    while entry:
        one = entry.contents
        packed = _packed(one.address)
        if one.flags & IFF_UP and packed is not None:
            family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
            # BSD may leave a mask's family empty, so its length is taken from the address.
            mask = _bytes_at(one.mask, family) if one.mask else b""
            prefix = int.from_bytes(mask).bit_count()
            name = one.name.decode(errors="backslashreplace")
            yield HostAddress(name, socket.inet_ntop(family, packed), prefix)
        entry = one.next


def _packed(place: int | None) -> bytes | None:
    """Return the address in a `struct sockaddr`; None where it is neither IPv4 nor IPv6."""
    if not place:
        return None
    family = int.from_bytes(
        ctypes.string_at(place + FAMILY_OFFSET, FAMILY_BYTES), byteorder=sys.byteorder
    )
    return _bytes_at(place, family) if family in ADDRESS_OF_FAMILY else None


def _bytes_at(place: int, family: int) -> bytes:
    offset, size = ADDRESS_OF_FAMILY[socket.AddressFamily(family)]
    return ctypes.string_at(place + offset, size)
