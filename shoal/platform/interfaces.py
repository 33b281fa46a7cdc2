"""The addresses of this machine's network interfaces, asked of Linux's C library."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.platform.sockets import own_address_towards

IFF_UP = 0x1
DEFAULT_ROUTE = "192.0.2.1"  # an address of RFC 5737, which no machine has
# Offset and bytes of the address in a `struct sockaddr` of each family.
ADDRESS_OF_FAMILY = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}


class _InterfaceAddress(ctypes.Structure):
    """The beginning of `struct ifaddrs`."""


_InterfaceAddress._fields_ = [
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


@dataclass(frozen=True)
class HostAddress:
    """One address of a host.

    Args:
        interface: the network interface that has it.
        address: IPv4 or IPv6, without a scope.
    """

    interface: str
    address: str


def addresses_that_are_up() -> list[HostAddress]:
    """Return all addresses of interfaces that are up, in the order of the system.

    Raises:
        OSError: the system does not tell them.
    """
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if library.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        return list(_addresses(first))
    finally:
        library.freeifaddrs(first)


def route_interface(address: str) -> str | None:
    """Return the interface of the route to an address or name; None without a network, and for a
    loopback address.

    For a name of this machine itself that of the default route stands in, or the first one that is
    no loopback.
    """
    if _is_loopback(address):
        return None
    up = addresses_that_are_up()
    names = {one.address: one.interface for one in up if not _is_loopback(one.address)}
    for target in (address, DEFAULT_ROUTE):
        with contextlib.suppress(OSError):
            if (source := own_address_towards(target)) in names:
                return names[source]
    return next(iter(names.values()), None)


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):  # a name
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def _addresses(entry: Any) -> Iterator[HostAddress]:
    """Yield the addresses of a linked list, from the one to which `entry` points."""
    while entry:
        one = entry.contents
        at = one.address
        family = int.from_bytes(ctypes.string_at(at, 2), sys.byteorder) if at else 0
        if one.flags & IFF_UP and family in ADDRESS_OF_FAMILY:
            offset, size = ADDRESS_OF_FAMILY[socket.AddressFamily(family)]
            address = socket.inet_ntop(family, ctypes.string_at(at + offset, size))
            yield HostAddress(one.name.decode(errors="backslashreplace"), address)
        entry = one.next
