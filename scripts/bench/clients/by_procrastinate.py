"""Procrastinate on PostgreSQL, as `peers.run_client` runs it: KIND CONNECTIONS CALLS ADDRESS.

A round trip is a job that is deferred, fetched and finished through the library's own job manager.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from procrastinate import App, PsycopgConnector
from procrastinate.jobs import Status

PAYLOAD = "x" * 256


async def main(kind: str, connections: int, calls: int, address: str) -> dict[str, object]:
    host, _, port = address.partition(":")
    where = f"host={host} port={port} user=bench dbname=postgres"
    app = App(connector=PsycopgConnector(conninfo=where, min_size=connections, max_size=connections))

    @app.task(name="echo")
    async def echo(payload: str) -> None: ...

    async with app.open_async():
        if not await app.check_connection_async():
            await app.schema_manager.apply_schema_async()
        if kind == "count":
            row = await app.connector.execute_query_one_async(
                "SELECT count(*) AS ready FROM procrastinate_jobs WHERE queue_name = 'bench' AND status = 'todo'"
            )
            return {"ready": row["ready"]}
        seconds: list[float] = []

        async def enqueue() -> None:
            task = app.configure_task("echo", queue="bench")
            for _ in range(calls // connections):
                await task.defer_async(payload=PAYLOAD)

        async def trip() -> None:
            task = app.configure_task("echo", queue="trip")
            worker = await app.job_manager.register_worker()
            for _ in range(calls // connections):
                began = time.monotonic()
                await task.defer_async(payload=PAYLOAD)
                job = await app.job_manager.fetch_job(queues=["trip"], worker_id=worker)
                assert job is not None
                await app.job_manager.finish_job(job, status=Status.SUCCEEDED, delete_job=True)
                seconds.append(time.monotonic() - began)

        began = time.monotonic()
        await asyncio.gather(*(enqueue() if kind == "enqueue" else trip() for _ in range(connections)))
        took = time.monotonic() - began
        return {"rate": calls // connections * connections / took, "seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))))
