"""Celery on Redis, as `peers.run_client` runs it: KIND CONNECTIONS CALLS ADDRESS.

A round trip is a task that is sent, done by one worker, and whose result has come back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import redis
from celery import Celery

PAYLOAD = "x" * 256
QUEUE = "bench"


def application(address: str) -> Celery:
    app = Celery("bench", broker=f"redis://{address}/0", backend=f"redis://{address}/1")
    app.conf.update(task_acks_late=True, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)

    @app.task(name="echo")
    def echo(payload: str) -> int:
        return len(payload)

    return app


def main(kind: str, connections: int, calls: int, address: str) -> dict[str, object]:
    app = application(address)
    if kind == "count":
        host, _, port = address.partition(":")
        return {"ready": redis.Redis(host, int(port)).llen(QUEUE)}
    seconds: list[float] = []

    def enqueue() -> None:
        with app.connection_for_write() as connection, app.amqp.Producer(connection) as producer:
            for _ in range(calls // connections):
                app.send_task("echo", (PAYLOAD,), queue=QUEUE, ignore_result=True, producer=producer)

    def trips() -> None:
        for _ in range(calls // connections):
            began = time.monotonic()
            app.send_task("echo", (PAYLOAD,), queue="trip").get(timeout=60)
            seconds.append(time.monotonic() - began)

    worker = None
    if kind == "round trip":
        command = [sys.executable, str(Path(__file__)), "worker", "1", "1", address]
        worker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        app.send_task("echo", (PAYLOAD,), queue="trip").get(timeout=60)  # it is up
    threads = [threading.Thread(target=enqueue if worker is None else trips) for _ in range(connections)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    if worker is not None:
        worker.terminate()
        worker.wait()
    return {"rate": calls // connections * connections / took, "seconds": seconds}


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        application(sys.argv[4]).worker_main(["worker", "--pool", "solo", "--queues", "trip", "--loglevel", "ERROR"])
    else:
        print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
