"""Which front a router gets: the one that the configuration names, or the public one in its place."""

from __future__ import annotations

import structlog

from router.front import Front, FrontOptions, FrontUnavailable, Receiver
from router.front_aio import AioFront
from router.front_queue import QueueFront

KINDS = ("queue", "aio")

log = structlog.get_logger()


def make_front(options: FrontOptions, receiver: Receiver, kind: str) -> Front:
    """A front of the `kind` of `server.grpc_front`, not started yet.

    "queue" becomes "aio", with a warning, where the installed grpcio does not fit it. Raises
    ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"a front is one of {', '.join(KINDS)}, not {kind!r}")
    if kind == "queue":
        try:
            return QueueFront(options, receiver)
        except FrontUnavailable as reason:
            log.warning(
                "the queue front does not fit the installed grpcio, using the slower aio front", reason=str(reason)
            )
    return AioFront(options, receiver)
