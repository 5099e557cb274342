"""The shard's loop, as far as it can be tried without a process: who waits for a sync, what a turn takes in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import zmq

from common import wire
from common.config import Config
from common.control import StartShard
from common.wire import Op
from shard.machine import Machine
from shard.process import ShardProcess
from shard.state import Instant
from shard.store import Family
from shard.store_memory import MemoryStore
from shard.turns import TURN_CHANGES, Turns

NOW = Instant(1_700_000_000_000, 1)
ROUTER = "router-0-1"


class Thread:
    """Where the sync thread is: it begins a sync and says no more."""

    def __init__(self) -> None:
        self.begun = 0

    def begin(self) -> None:
        self.begun += 1


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ShardProcess]:
    start = StartShard(
        index=0,
        name="shard-0",
        generation=1,
        directory=str(tmp_path),
        address=f"ipc://{tmp_path}/shard-0",
        config={},
        epoch=1,
        owners=[0] * 4096,
        shards=1,
        routers=[ROUTER],
    )
    made = ShardProcess(start, control=None, messages=SimpleQueue())  # type: ignore[arg-type]
    yield made
    made._links.close(0)
    made._inbox.close(linger=0)
    made._context.term()


def write_turn(turns: Turns, number: int) -> None:
    operation: list[Any] = [number, Op.ENQUEUE, b"\x01\x02\x03", [["q", 0, 3, 0, None, b""]]]
    turns.take(wire.pack(1, ROUTER, number, [operation]), NOW)
    turns.close()
    turns.write()


def test_a_quiet_shard_syncs_until_no_answer_waits(process: ShardProcess) -> None:
    store, thread = MemoryStore(), Thread()
    turns = Turns(Machine(store, Config(), NOW, 0, [ROUTER]), store, "shard-0", 1, process._want_sync)
    write_turn(turns, 1)
    process._sync_as_wanted(turns, store, thread, is_quiet=False)  # type: ignore[arg-type]
    write_turn(turns, 2)
    store.sync()
    turns.synced()  # the thread has returned, and the second turn wants a sync
    write_turn(turns, 3)  # which begins after this one was written: the third wants one more
    process._sync_as_wanted(turns, store, thread, is_quiet=True)  # type: ignore[arg-type]
    assert turns.is_idle
    assert thread.begun == 1


def test_a_busy_shard_leaves_its_sync_to_the_thread(process: ShardProcess) -> None:
    store, thread = MemoryStore(), Thread()
    turns = Turns(Machine(store, Config(), NOW, 0, [ROUTER]), store, "shard-0", 1, process._want_sync)
    write_turn(turns, 1)
    process._sync_as_wanted(turns, store, thread, is_quiet=False)  # type: ignore[arg-type]
    assert not turns.is_idle
    assert thread.begun == 1


# -- what a turn takes in ---------------------------------------------------------------------------

HALF = TURN_CHANGES // 2


@pytest.fixture
def router(process: ShardProcess, tmp_path: Path) -> Iterator[zmq.SyncSocket]:
    """Sends to the inbox of the process."""
    address = f"ipc://{tmp_path}/shard-0"
    process._inbox.bind(address)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(address)
        yield socket


def envelope(number: int, jobs: int) -> bytes:
    queued = [["q", 0, 3, 0, None, b""] for _ in range(jobs)]
    return wire.pack(1, ROUTER, number, [[number, Op.ENQUEUE, bytes(3 * jobs), queued]])


def taken_in(process: ShardProcess, turns: Turns) -> int:
    """Envelopes that a turn takes in, of those that have come."""
    assert process._inbox.poll(10_000)
    return process._take_envelopes(turns, NOW)


def test_a_turn_ends_with_the_envelope_that_fills_it(process: ShardProcess, router: zmq.SyncSocket) -> None:
    store = MemoryStore()
    turns = Turns(Machine(store, Config(), NOW, 0, [ROUTER]), store, "shard-0", 1, process._want_sync)
    for number in range(1, 4):
        router.send(envelope(number, HALF + 1))
    taken = 0
    while taken < 2:  # they may come one after the other
        taken += taken_in(process, turns)
    assert (taken, turns.is_full) == (2, True)
    turns.close()
    turns.write()
    assert taken_in(process, turns) == 1


def test_a_turn_that_is_full_of_what_was_due_takes_one_envelope(process: ShardProcess, router: zmq.SyncSocket) -> None:
    store = MemoryStore()
    turns = Turns(Machine(store, Config(), NOW, 0, [ROUTER]), store, "shard-0", 1, process._want_sync)
    for number in range(TURN_CHANGES):
        store.put(Family.META, b"%d" % number, b"")
    for number in (1, 2):
        router.send(envelope(number, 1))
    assert taken_in(process, turns) == 1
