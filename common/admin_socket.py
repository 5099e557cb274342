"""Where the admin service of a server is: a Unix socket in its data directory, for both its ends."""

from __future__ import annotations

SOCKET_FILE = "admin.sock"
SERVICE = "seppd.admin.v1.Admin"


class AdminError(Exception):
    """A command that could not be done; the text is one line and says why."""


def socket_target(directory_fd: int) -> str:
    """The gRPC address of the socket in an open directory.

    By its descriptor, because the path of a Unix socket has 107 bytes and a data directory may lie deeper.
    """
    return f"unix:/proc/self/fd/{directory_fd}/{SOCKET_FILE}"
