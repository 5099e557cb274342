"""A server of `sepp.v1` through the official client, as `peers.run_client` runs it: KIND CONNECTIONS CALLS ADDRESS."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from datetime import timedelta

import sepp

PAYLOAD = sepp.Payload(b"x" * 256, "application/octet-stream")


async def main(kind: str, connections: int, calls: int, address: str) -> dict[str, object]:
    clients = [await sepp.SeppClient.connect(address) for _ in range(connections)]
    seconds: list[float] = []

    async def enqueue(client: sepp.SeppClient) -> None:
        for _ in range(calls // connections):
            await client.enqueue(sepp.EnqueueRequest("bench", "bench", payload=PAYLOAD))

    async def trip(client: sepp.SeppClient) -> None:
        options = sepp.ReserveOptions(["trip"], lease_duration=timedelta(hours=1), max_jobs=1)
        for _ in range(calls // connections):
            began = time.monotonic()
            await client.enqueue(sepp.EnqueueRequest("trip", "bench", payload=PAYLOAD))
            (job,) = await client.reserve(options) or ()
            await client.ack(job.ctx)
            seconds.append(time.monotonic() - began)

    began = time.monotonic()
    await asyncio.gather(*map(enqueue if kind == "enqueue" else trip, clients))
    took = time.monotonic() - began
    for client in clients:
        await client.close()
    return {"rate": calls // connections * connections / took, "seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))))
