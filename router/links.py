"""The router's sockets: one that takes what shards send, and one to each shard's process.

Receiving and sending have sockets of their own, so that a thread may send while another waits for
messages: the sending ones are used under the core's lock only, the receiving one by one thread.
"""

from __future__ import annotations

import zmq

# Milliseconds in which the last messages may leave when the router ends.
LINGER_MS = 1_000
# Milliseconds between attempts to connect. libzmq's default of 100 would delay the first operation.
RECONNECT_MS = 10


class ShardLinks:
    """ZeroMQ over ipc. Each process of a shard has an address of its own, so nothing that was meant
    for one can reach its successor."""

    def __init__(self, address: str, shards: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.inbox = self._context.socket(zmq.PULL)
        self.inbox.rcvhwm = 0  # bounded by what this router has asked for
        self.inbox.bind(address)
        self._outgoing: list[zmq.Socket[bytes] | None] = [None] * shards

    def connect(self, shard: int, address: str) -> None:
        self.disconnect(shard)
        link = self._context.socket(zmq.PUSH)
        link.sndhwm = 0  # at most two envelopes are out
        link.reconnect_ivl = RECONNECT_MS
        link.connect(address)
        self._outgoing[shard] = link

    def disconnect(self, shard: int) -> None:
        link = self._outgoing[shard]
        if link is not None:
            link.close(linger=0)
            self._outgoing[shard] = None

    def resize(self, shards: int) -> None:
        """There are this many shards from now on; what goes to shards that are no more is dropped."""
        for shard in range(shards, len(self._outgoing)):
            self.disconnect(shard)
        del self._outgoing[shards:]
        self._outgoing += [None] * (shards - len(self._outgoing))

    def send(self, shard: int, message: bytes) -> None:
        link = self._outgoing[shard]
        assert link is not None, "an envelope for a shard that is down"
        link.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        for link in self._outgoing:
            if link is not None:
                link.close(linger=LINGER_MS)
        self.inbox.close(linger=0)
        self._context.term()
