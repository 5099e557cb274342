"""The address that the routers share, and the hold that the supervisor has on its port.

All routers listen on one port with SO_REUSEPORT. That option would also let a stranger's second
server join without an error and take half of the connections, so the supervisor looks first
whether the port is free, then keeps it with a socket that is bound and never listens: the kernel
gives no connections to such a socket. Port 0 is settled here, since each router would get its own.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from types import TracebackType


class ListenAddressError(Exception):
    """The address cannot be used; the text is one line and says what to do."""


@dataclass(frozen=True)
class ListenAddress:
    """A host (a name or a literal, IPv6 without its brackets) and a port, 0 for any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class HeldAddress:
    """A port that is held for the routers until `close`. `address` is the literal address with its real port."""

    def __init__(self, address: ListenAddress, placeholder: socket.socket) -> None:
        self.address = address
        self._placeholder = placeholder

    def close(self) -> None:
        self._placeholder.close()

    def __enter__(self) -> HeldAddress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def hold(wanted: ListenAddress) -> HeldAddress:
    """Resolve the host, refuse a port that another process has, hold it. Raises ListenAddressError."""
    family, host = _resolve(wanted)
    placeholder: socket.socket | None = None
    try:
        if wanted.port:
            _probe(family, host, wanted.port)
        placeholder = _bind_placeholder(family, host, wanted.port)
        port: int = placeholder.getsockname()[1]
    except OSError as error:
        if placeholder is not None:
            placeholder.close()
        raise ListenAddressError(_explain(wanted, error)) from error
    return HeldAddress(ListenAddress(host, port), placeholder)


def _resolve(wanted: ListenAddress) -> tuple[socket.AddressFamily, str]:
    """One literal for a host, IPv4 where a name has both: every router and the placeholder must mean the same."""
    try:
        found = socket.getaddrinfo(wanted.host, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ListenAddressError(
            f"listen address {wanted}: the host is not known ({error}); use a name or address of this machine"
        ) from error
    family, _, _, _, sockaddr = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, str(sockaddr[0])


def _probe(family: socket.AddressFamily, host: str, port: int) -> None:
    """Fail when somebody has the port. SO_REUSEADDR: connections of an earlier server in TIME_WAIT do not count."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def _bind_placeholder(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    """Without SO_REUSEADDR the placeholder fails the probe of a second server that starts before our routers
    listen; with it, only where leftovers of a server of another kind leave no choice."""
    for reuse_address in (0, 1):
        placeholder = socket.socket(family, socket.SOCK_STREAM)
        try:
            placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse_address)
            placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            placeholder.bind((host, port))
        except OSError as error:
            placeholder.close()
            if reuse_address or error.errno != errno.EADDRINUSE:
                raise
        else:
            return placeholder
    raise AssertionError("the second try returns or raises")


def _explain(wanted: ListenAddress, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"listen address {wanted} is in use by another process; stop it or choose another server.listen_addr"
    if error.errno == errno.EACCES:
        return f"listen address {wanted} is not permitted to this user; choose a port from 1024 on"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"listen address {wanted} cannot be used ({reason}); choose another server.listen_addr"
