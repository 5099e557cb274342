"""NATS JetStream through its usual client, as `peers.run_client` runs it: KIND CONNECTIONS CALLS ADDRESS."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import nats
from nats.js.api import AckPolicy, ConsumerConfig, StorageType

PAYLOAD = b"x" * 256


async def main(kind: str, connections: int, calls: int, address: str) -> dict[str, object]:
    clients = [await nats.connect(f"nats://{address}") for _ in range(connections)]
    streams = [client.jetstream() for client in clients]
    for stream in ("bench", "trip"):
        await streams[0].add_stream(name=stream, subjects=[stream], storage=StorageType.FILE)
    if kind == "count":
        return {"ready": (await streams[0].stream_info("bench")).state.messages}
    seconds: list[float] = []

    async def enqueue(place: int) -> None:
        for _ in range(calls // connections):
            await streams[place].publish("bench", PAYLOAD)

    async def trip(place: int) -> None:
        config = ConsumerConfig(durable_name="workers", ack_policy=AckPolicy.EXPLICIT)
        consumer = await streams[place].pull_subscribe("trip", durable="workers", config=config)
        for _ in range(calls // connections):
            began = time.monotonic()
            await streams[place].publish("trip", PAYLOAD)
            (message,) = await consumer.fetch(1)
            await message.ack_sync()
            seconds.append(time.monotonic() - began)

    began = time.monotonic()
    work = enqueue if kind == "enqueue" else trip
    await asyncio.gather(*(work(place) for place in range(connections)))
    took = time.monotonic() - began
    for client in clients:
        await client.close()
    return {"rate": calls // connections * connections / took, "seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))))
