"""The store: one suite for both of its forms, and what only one of them can show."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shard.store import Family, Store, StoreBusy, StoreCorrupt, StoreError
from shard.store_memory import MemoryStore
from shard.store_rocks import PersistMode, RocksStore, StoreOptions

ROOT = Path(__file__).resolve().parents[2]
LAST = b"\xff" * 8


class Bench(Protocol):
    """A store under test, with what a test does to it from outside."""

    store: Store

    def reopen(self) -> None:
        """Close it and open it again."""

    def refuse_writes(self, refused: bool) -> None: ...

    def fail_next_sync(self) -> None: ...


class MemoryBench:
    def __init__(self) -> None:
        self.store = MemoryStore()

    def reopen(self) -> None:
        self.store.close()
        self.store = self.store.crash()

    def refuse_writes(self, refused: bool) -> None:
        self.store.refuse_writes = refused

    def fail_next_sync(self) -> None:
        self.store.fail_next_sync = True


class RocksBench:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = RocksStore.open(directory, StoreOptions())

    def reopen(self) -> None:
        self.store.close()
        self.store = RocksStore.open(self.directory, StoreOptions())

    def refuse_writes(self, refused: bool) -> None:
        """With one file in its first level a family stops all writes, if that is set to be too many."""
        dead = self.store._families[Family.DEAD]
        if refused:
            dead.put(b"one file", b"")
            dead.flush()
        files = "1" if refused else "100"
        dead.set_options({"level0_slowdown_writes_trigger": files, "level0_stop_writes_trigger": files})

    def fail_next_sync(self) -> None:
        self.store._database = DatabaseWithoutSync(self.store._database)  # type: ignore[assignment]


class DatabaseWithoutSync:
    """A database whose disk fails."""

    def __init__(self, database: Any) -> None:
        self._database = database

    def flush_wal(self, sync: bool) -> None:
        raise Exception("IO error: While fdatasync: Input/output error")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)


@pytest.fixture(params=["memory", "rocks"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made: Bench = MemoryBench() if request.param == "memory" else RocksBench(tmp_path / "shard")
    yield made
    made.store.close()


@pytest.fixture
def store(bench: Bench) -> Store:
    return bench.store


def fill(store: Store, *keys: bytes, family: Family = Family.JOBS) -> None:
    """Write keys whose value is the key in upper case."""
    for key in keys:
        store.put(family, key, key.upper())
    store.write()


def keys_in(store: Store, start: bytes = b"", end: bytes = LAST, limit: int = 1000) -> list[bytes]:
    return [key for key, _ in store.scan(Family.JOBS, start, end, limit)]


# -- reads ------------------------------------------------------------------------------------


def test_a_key_that_was_never_put_is_not_there(store: Store) -> None:
    assert store.get(Family.JOBS, b"a") is None


def test_a_written_value_is_found(store: Store) -> None:
    fill(store, b"a")
    assert store.get(Family.JOBS, b"a") == b"A"


def test_an_empty_value_is_found(store: Store) -> None:
    store.put(Family.JOBS, b"a", b"")
    store.write()
    assert store.get(Family.JOBS, b"a") == b""


def test_a_pending_put_is_seen_by_get(store: Store) -> None:
    fill(store, b"a")
    store.put(Family.JOBS, b"a", b"new")
    assert store.get(Family.JOBS, b"a") == b"new"


def test_a_pending_deletion_is_seen_by_get(store: Store) -> None:
    fill(store, b"a")
    store.delete(Family.JOBS, b"a")
    assert store.get(Family.JOBS, b"a") is None


def test_families_do_not_see_one_another(store: Store) -> None:
    for family in Family:
        store.put(family, b"a", family.name.encode())
    store.write()
    found = {family: store.scan(family, b"", LAST, 10) for family in Family}
    assert found == {family: [(b"a", family.name.encode())] for family in Family}


def test_a_value_of_one_mebibyte_comes_back_whole(bench: Bench) -> None:
    value = random.Random(7).randbytes(1 << 20)
    bench.store.put(Family.JOBS, b"a", value)
    bench.store.write()
    bench.reopen()
    assert bench.store.scan(Family.JOBS, b"a", b"b", 2) == [(b"a", value)]


# -- scans ------------------------------------------------------------------------------------


def test_a_scan_is_in_order_of_bytes(store: Store) -> None:
    fill(store, b"b", b"\x80", b"a", b"aa", b"B")
    assert keys_in(store) == [b"B", b"a", b"aa", b"b", b"\x80"]


def test_a_scan_has_its_start_but_not_its_end(store: Store) -> None:
    fill(store, b"a", b"b", b"c", b"d")
    assert keys_in(store, b"b", b"d") == [b"b", b"c"]


def test_a_scan_sees_pending_keys_at_its_edges_as_it_sees_written_ones(store: Store) -> None:
    fill(store, b"bb")
    for key in (b"a", b"b", b"c", b"d"):
        store.put(Family.JOBS, key, b"new")
    assert store.scan(Family.JOBS, b"b", b"d", 10) == [(b"b", b"new"), (b"bb", b"BB"), (b"c", b"new")]


def test_a_scan_sees_new_overwritten_and_deleted_keys(store: Store) -> None:
    fill(store, b"b", b"d", b"f")
    store.put(Family.JOBS, b"a", b"new")
    store.put(Family.JOBS, b"b", b"overwritten")
    store.put(Family.JOBS, b"c", b"new")
    store.delete(Family.JOBS, b"d")
    store.delete(Family.JOBS, b"e")
    store.put(Family.JOBS, b"g", b"new")
    assert store.scan(Family.JOBS, b"", LAST, 10) == [
        (b"a", b"new"),
        (b"b", b"overwritten"),
        (b"c", b"new"),
        (b"f", b"F"),
        (b"g", b"new"),
    ]


def test_a_scan_sees_what_became_pending_after_the_scan_before(store: Store) -> None:
    fill(store, b"c")
    store.put(Family.JOBS, b"d", b"new")
    before = keys_in(store)
    store.put(Family.JOBS, b"b", b"new")
    store.put(Family.JOBS, b"a", b"new")
    store.delete(Family.JOBS, b"d")
    assert (before, keys_in(store)) == ([b"c", b"d"], [b"a", b"b", b"c"])


def test_a_key_that_is_deleted_and_put_again_in_a_turn_is_there(store: Store) -> None:
    fill(store, b"a")
    store.delete(Family.JOBS, b"a")
    store.put(Family.JOBS, b"a", b"again")
    assert store.scan(Family.JOBS, b"", LAST, 10) == [(b"a", b"again")]


def test_a_scan_after_a_write_does_not_see_changes_of_the_turn_before_twice(store: Store) -> None:
    store.put(Family.JOBS, b"a", b"1")
    keys_in(store)
    store.write()
    store.put(Family.JOBS, b"b", b"2")
    assert store.scan(Family.JOBS, b"", LAST, 10) == [(b"a", b"1"), (b"b", b"2")]


def test_a_scan_stops_at_its_limit_whether_keys_are_written_or_pending(store: Store) -> None:
    fill(store, b"a", b"c")
    store.put(Family.JOBS, b"b", b"new")
    assert [keys_in(store, limit=limit) for limit in range(5)] == [
        [],
        [b"a"],
        [b"a", b"b"],
        [b"a", b"b", b"c"],
        [b"a", b"b", b"c"],
    ]


def test_deleted_keys_do_not_count_for_the_limit(store: Store) -> None:
    fill(store, b"a", b"b", b"c")
    store.delete(Family.JOBS, b"a")
    assert keys_in(store, limit=2) == [b"b", b"c"]


def test_a_scan_of_nothing_is_empty(store: Store) -> None:
    fill(store, b"a", b"b")
    store.put(Family.JOBS, b"c", b"new")
    assert [keys_in(store, b"b", b"b"), keys_in(store, b"c", b"a"), keys_in(store, b"d")] == [[], [], []]


@pytest.mark.parametrize(("limit_bytes", "count"), [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (6, 3), (99, 3)])
def test_a_scan_stops_after_the_pair_that_reaches_its_bytes(store: Store, limit_bytes: int, count: int) -> None:
    fill(store, b"a", b"c")
    store.put(Family.JOBS, b"b", b"B")
    expected = [(b"a", b"A"), (b"b", b"B"), (b"c", b"C")][:count]
    assert store.scan(Family.JOBS, b"", LAST, 10, limit_bytes) == expected


def test_a_scan_over_many_deletions_finds_what_is_left(store: Store) -> None:
    keys = [b"%06d" % number for number in range(20_000)]
    fill(store, *keys)
    for key in keys[:-2]:
        store.delete(Family.JOBS, key)
    store.write()
    for key in keys[:10]:
        store.put(Family.JOBS, key, b"again")
    store.write()
    assert keys_in(store) == [*keys[:10], *keys[-2:]]


# -- the end of a turn ------------------------------------------------------------------------


def test_a_write_of_nothing_says_so(store: Store) -> None:
    assert store.write() is False


def test_a_write_of_something_says_so_once(store: Store) -> None:
    store.put(Family.JOBS, b"a", b"")
    assert (store.write(), store.write()) == (True, False)


def test_a_deletion_of_what_is_not_there_is_written_too(store: Store) -> None:
    store.delete(Family.JOBS, b"a")
    assert store.write() is True


def test_a_sync_without_anything_written_succeeds(store: Store) -> None:
    store.sync()
    store.sync()
    assert store.get(Family.JOBS, b"a") is None


def test_what_was_written_is_there_after_a_close(bench: Bench) -> None:
    fill(bench.store, b"a", b"b")
    bench.store.delete(Family.JOBS, b"a")
    bench.store.write()
    bench.reopen()
    assert bench.store.scan(Family.JOBS, b"", LAST, 10) == [(b"b", b"B")]


def test_what_was_pending_is_gone_after_a_close(bench: Bench) -> None:
    bench.store.put(Family.JOBS, b"a", b"pending")
    bench.reopen()
    assert bench.store.get(Family.JOBS, b"a") is None


def test_a_closed_store_can_be_closed_again_but_not_written(store: Store) -> None:
    store.close()
    store.close()
    store.put(Family.JOBS, b"a", b"")
    with pytest.raises(StoreError, match="closed"):
        store.write()
    with pytest.raises(StoreError, match="closed"):
        store.sync()


def test_a_refused_write_keeps_the_changes_pending_for_the_next_try(bench: Bench) -> None:
    fill(bench.store, b"a")
    bench.refuse_writes(True)
    bench.store.put(Family.JOBS, b"b", b"B")
    bench.store.delete(Family.JOBS, b"a")
    with pytest.raises(StoreBusy):
        bench.store.write()
    assert bench.store.pending[Family.JOBS] == {b"b": b"B", b"a": None}
    bench.store.put(Family.JOBS, b"c", b"C")
    bench.refuse_writes(False)
    assert bench.store.write() is True
    assert bench.store.scan(Family.JOBS, b"", LAST, 10) == [(b"b", b"B"), (b"c", b"C")]


def test_a_refused_write_leaves_nothing_behind(bench: Bench) -> None:
    fill(bench.store, b"a")
    bench.refuse_writes(True)
    bench.store.put(Family.JOBS, b"b", b"B")
    with pytest.raises(StoreBusy):
        bench.store.write()
    bench.refuse_writes(False)
    bench.reopen()
    assert bench.store.scan(Family.JOBS, b"", LAST, 10) == [(b"a", b"A")]


def test_after_a_failed_sync_everything_but_reading_fails(bench: Bench) -> None:
    fill(bench.store, b"a")
    bench.fail_next_sync()
    for _ in range(2):
        with pytest.raises(StoreError):
            bench.store.sync()
    bench.store.put(Family.JOBS, b"b", b"B")
    with pytest.raises(StoreError):
        bench.store.write()
    assert bench.store.get(Family.JOBS, b"a") == b"A"


def test_a_sync_in_another_thread_goes_on_beside_writes(bench: Bench) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def keep_syncing() -> None:
        try:
            while not stop.is_set():
                bench.store.sync()
        except StoreError as error:
            failures.append(error)

    thread = threading.Thread(target=keep_syncing)
    thread.start()
    try:
        for number in range(300):
            fill(bench.store, b"%06d" % number)
    finally:
        stop.set()
        thread.join()
    bench.reopen()
    assert (failures, len(keys_in(bench.store))) == ([], 300)


# -- any order of steps -----------------------------------------------------------------------

KEYS = st.sampled_from([b"", b"\x00", b"a", b"aa", b"ab", b"b", b"ba", b"\x80", b"\xff", b"\xff\xff"])
FAMILIES = st.sampled_from([Family.JOBS, Family.LEASES])
STEPS = st.one_of(
    st.tuples(st.just("put"), FAMILIES, KEYS, st.binary(max_size=3)),
    st.tuples(st.just("delete"), FAMILIES, KEYS),
    st.tuples(st.just("get"), FAMILIES, KEYS),
    st.tuples(st.just("scan"), FAMILIES, KEYS, KEYS, st.integers(0, 6), st.integers(0, 12)),
    st.tuples(st.just("write")),
    st.tuples(st.just("sync")),
    st.tuples(st.just("reopen")),
)
Rows = list[tuple[bytes, bytes]]


class Plain:
    """What a store should answer, in the plainest words."""

    def __init__(self) -> None:
        self.written: dict[tuple[Family, bytes], bytes] = {}
        self.seen: dict[tuple[Family, bytes], bytes] = {}

    def put(self, family: Family, key: bytes, value: bytes) -> None:
        self.seen[family, key] = value

    def delete(self, family: Family, key: bytes) -> None:
        self.seen.pop((family, key), None)

    def get(self, family: Family, key: bytes) -> bytes | None:
        return self.seen.get((family, key))

    def scan(self, family: Family, start: bytes, end: bytes, limit: int, limit_bytes: int) -> Rows:
        rows = sorted((key, value) for (of, key), value in self.seen.items() if of == family and start <= key < end)
        fitting = [
            n for n in range(len(rows) + 1) if n <= 1 or sum(len(k) + len(v) for k, v in rows[: n - 1]) < limit_bytes
        ]
        return rows[: min(limit, max(fitting))]

    def write(self) -> None:
        self.written = dict(self.seen)

    def sync(self) -> None:
        pass

    def reopen(self) -> None:
        self.seen = dict(self.written)


def answer(of: Any, step: tuple[Any, ...]) -> Any:
    """What a bench or the plain words say to a step; only reads have an answer."""
    name, *arguments = step
    target = of if isinstance(of, Plain) or name == "reopen" else of.store
    given_back = getattr(target, name)(*arguments)
    return given_back if name in ("get", "scan") else None


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEPS, max_size=40))
def test_both_stores_answer_alike_and_rightly_after_any_steps(steps: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        rocks = RocksBench(Path(directory) / "shard")
        memory = MemoryBench()
        plain = Plain()
        try:
            for step in steps:
                expected = answer(plain, step)
                assert (step, answer(rocks, step), answer(memory, step)) == (step, expected, expected)
        finally:
            rocks.store.close()


# -- in memory: what a crash keeps ------------------------------------------------------------


def test_a_crash_keeps_what_was_synced_and_loses_the_rest() -> None:
    store = MemoryStore()
    fill(store, b"a")
    store.sync()
    fill(store, b"b")
    store.put(Family.JOBS, b"c", b"pending")
    assert keys_in(store.crash()) == [b"a"]


def test_a_crash_may_keep_any_front_part_of_what_was_not_synced() -> None:
    store = MemoryStore()
    fill(store, b"a")
    store.sync()
    fill(store, b"b", b"c")
    fill(store, b"d")
    assert store.unsynced == 2
    assert [keys_in(store.crash(keep)) for keep in range(3)] == [[b"a"], [b"a", b"b", b"c"], [b"a", b"b", b"c", b"d"]]


def test_a_crash_cannot_keep_more_than_was_written() -> None:
    with pytest.raises(ValueError, match="keep_unsynced 1 is not within 0 to 0"):
        MemoryStore().crash(1)


def test_a_sync_does_not_reach_what_was_written_after_it_began() -> None:
    store = MemoryStore()
    fill(store, b"a")
    reach = store.begin_sync()
    fill(store, b"b")
    store.end_sync(reach)
    assert (store.unsynced, keys_in(store.crash())) == (1, [b"a"])


def test_a_sync_that_ends_late_takes_nothing_back() -> None:
    store = MemoryStore()
    fill(store, b"a")
    reach = store.begin_sync()
    fill(store, b"b")
    store.sync()
    store.end_sync(reach)
    assert keys_in(store.crash()) == [b"a", b"b"]


def test_deletions_are_lost_in_a_crash_like_puts() -> None:
    store = MemoryStore()
    fill(store, b"a")
    store.sync()
    store.delete(Family.JOBS, b"a")
    store.write()
    assert (keys_in(store), keys_in(store.crash())) == ([], [b"a"])


def test_a_store_found_after_a_crash_can_crash_again() -> None:
    store = MemoryStore()
    fill(store, b"a")
    found = store.crash(keep_unsynced=1)
    fill(found, b"b")
    assert keys_in(found.crash()) == [b"a"]


def test_a_crashed_store_is_not_written_any_more() -> None:
    store = MemoryStore()
    store.crash()
    store.put(Family.JOBS, b"a", b"")
    with pytest.raises(StoreError, match="crashed"):
        store.write()


def test_after_a_failed_write_every_write_and_sync_fails() -> None:
    store = MemoryStore()
    store.fail_next_write = True
    store.put(Family.JOBS, b"a", b"")
    for attempt in (store.write, store.write, store.sync):
        with pytest.raises(StoreError, match="a write failed"):
            attempt()


def test_a_batch_whose_write_failed_may_survive_or_not() -> None:
    store = MemoryStore()
    store.fail_next_write = True
    store.put(Family.JOBS, b"a", b"")
    with pytest.raises(StoreError):
        store.write()
    assert [keys_in(store.crash(keep)) for keep in (0, 1)] == [[], [b"a"]]


# -- on disk: processes and damage ------------------------------------------------------------

# Batches of ten keys in each of two families; tells what was written and what was synced, and waits to
# be killed. They all fit into the memtables, so the log has them until the next start.
WRITER = """
import sys
from pathlib import Path
from shard.store import Family
from shard.store_rocks import RocksStore, StoreOptions

store = RocksStore.open(Path(sys.argv[1]), StoreOptions(persist_mode=sys.argv[2]))
for batch in range(2_000):
    for family in (Family.JOBS, Family.LEASES):
        for member in range(10):
            store.put(family, b"%06d-%d" % (batch, member), bytes(50))
    store.write()
    if batch % 3 == 0:
        store.sync()
        print("synced", batch, flush=True)
    else:
        print("written", batch, flush=True)
sys.stdin.read()
"""


def process(program: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def killed_writer(directory: Path, persist_mode: PersistMode, lines: int) -> dict[str, int]:
    """Let a process write until it has told `lines` times, and kill it: the last batch written and synced."""
    told = {"written": -1, "synced": -1}
    with process(WRITER, str(directory), persist_mode) as writer:
        assert writer.stdout is not None
        try:
            for _ in range(lines):
                what, batch = writer.stdout.readline().split()
                told[what] = int(batch)
        finally:
            writer.kill()
    assert writer.returncode == -signal.SIGKILL
    return told


@contextlib.contextmanager
def opened(directory: Path, persist_mode: PersistMode = "sync_all") -> Iterator[RocksStore]:
    store = RocksStore.open(directory, StoreOptions(persist_mode=persist_mode))
    try:
        yield store
    finally:
        store.close()


def batches_in(store: RocksStore) -> list[bytes]:
    """The numbers of the writer's batches, after a check that each is whole in both families."""
    jobs = [key for key, _ in store.scan(Family.JOBS, b"", LAST, 1 << 30)]
    leases = [key for key, _ in store.scan(Family.LEASES, b"", LAST, 1 << 30)]
    numbers = sorted({key[:6] for key in jobs})
    assert jobs == leases == [b"%s-%d" % (number, member) for number in numbers for member in range(10)]
    return numbers


@pytest.mark.parametrize("persist_mode", ["sync_all", "sync_data", "buffer"])
def test_a_killed_process_loses_no_batch_and_leaves_none_in_part(tmp_path: Path, persist_mode: PersistMode) -> None:
    told = killed_writer(tmp_path / "shard", persist_mode, lines=200)
    with opened(tmp_path / "shard", persist_mode) as store:
        numbers = batches_in(store)
    assert numbers == [b"%06d" % batch for batch in range(len(numbers))]
    assert len(numbers) > max(told["synced"], told["written"])


def test_a_second_process_is_refused_and_told_who_holds_the_store(tmp_path: Path) -> None:
    with process(WRITER, str(tmp_path / "shard"), "buffer") as writer:
        assert writer.stdout is not None
        try:
            writer.stdout.readline()
            with pytest.raises(StoreError, match=f"/shard is in use by process {writer.pid}: .*LOCK"):
                RocksStore.open(tmp_path / "shard", StoreOptions())
        finally:
            writer.kill()


def test_a_second_store_in_one_process_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path / "shard") as store:
        with pytest.raises(StoreError, match="/shard is in use by this process"):
            RocksStore.open(tmp_path / "shard", StoreOptions())
        fill(store, b"a")
    with opened(tmp_path / "shard") as store:
        assert keys_in(store) == [b"a"]


# A file may not grow beyond two mebibytes, so the log cannot at some time; SIGXFSZ is ignored by Python.
LIMITED_WRITER = """
import resource, sys
from pathlib import Path
from shard.store import Family, StoreBusy, StoreError
from shard.store_rocks import RocksStore, StoreOptions

store = RocksStore.open(Path(sys.argv[1]), StoreOptions())
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
for batch in range(1_000):
    for family in (Family.JOBS, Family.LEASES):
        for member in range(10):
            store.put(family, b"%06d-%d" % (batch, member), bytes(1000))
    try:
        store.write()
        store.sync()
    except StoreError:
        break
    print("synced", batch)
failures = 0
for attempt in (store.write, store.sync, store.write):
    try:
        attempt()
    except StoreBusy:
        pass
    except StoreError:
        failures += 1
print("failed", failures)
print("read", len(store.scan(Family.LEASES, b"000000-0", b"000000-9", 100)))
"""


def test_a_failed_write_ends_writing_and_a_new_start_finds_all_that_was_synced(tmp_path: Path) -> None:
    with process(LIMITED_WRITER, str(tmp_path / "shard")) as writer:
        output, _ = writer.communicate()
    *synced, failed, read = output.splitlines()
    assert (failed, read) == ("failed 3", "read 9")
    assert 0 < len(synced) < 1_000
    with opened(tmp_path / "shard") as store:
        assert len(batches_in(store)) in (len(synced), len(synced) + 1)


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """The directory of a killed process with 67 synced batches and at least one that was not."""
    killed_writer(tmp_path / "shard", "sync_all", lines=200)
    return tmp_path / "shard"


def log_of(directory: Path) -> Path:
    return max(directory.glob("*.log"), key=lambda path: path.stat().st_size)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def refused(directory: Path) -> str:
    """The one line with which a damaged store is refused; twice, for the first try must not repair it."""
    for _ in range(2):
        with pytest.raises(StoreCorrupt) as refusal:
            RocksStore.open(directory, StoreOptions())
    text = str(refusal.value)
    assert str(directory) in text
    assert "from a backup" in text
    assert "\n" not in text
    return text


def test_a_flipped_bit_in_the_middle_of_the_log_is_refused(crashed: Path) -> None:
    log = log_of(crashed)
    flip(log, log.stat().st_size // 2)
    assert "checksum mismatch" in refused(crashed)


def test_a_torn_end_of_the_log_loses_only_the_batch_that_was_torn(tmp_path: Path) -> None:
    with opened(tmp_path / "shard") as store:
        fill(store, b"a", b"b")
        store.sync()
        fill(store, b"c", b"d")
        # What a power loss leaves: all of the log but the end of its last record.
        shutil.copytree(tmp_path / "shard", tmp_path / "torn")
    log = log_of(tmp_path / "torn")
    os.truncate(log, log.stat().st_size - 1)
    with opened(tmp_path / "torn") as store:
        assert keys_in(store) == [b"a", b"b"]


def test_a_log_that_ends_before_what_was_synced_is_refused(crashed: Path) -> None:
    log = log_of(crashed)
    os.truncate(log, log.stat().st_size // 2)
    assert "the log ends at sequence number" in refused(crashed)


def test_an_emptied_log_is_refused(crashed: Path) -> None:
    os.truncate(log_of(crashed), 0)
    assert "the log ends at sequence number 0" in refused(crashed)


def test_a_missing_current_file_is_refused_and_nothing_is_removed(crashed: Path) -> None:
    with opened(crashed):
        pass
    (crashed / "CURRENT").unlink()
    before = sorted(crashed.iterdir())
    assert "CURRENT is missing" in refused(crashed)
    assert sorted(crashed.iterdir()) == before


def test_a_missing_manifest_is_refused(crashed: Path) -> None:
    for manifest in crashed.glob("MANIFEST-*"):
        manifest.unlink()
    assert "MANIFEST" in refused(crashed)


def test_a_missing_table_is_refused(crashed: Path) -> None:
    with opened(crashed):
        pass
    next(crashed.glob("*.sst")).unlink()
    assert ".sst" in refused(crashed)


def test_a_scan_over_a_damaged_table_fails_and_does_not_end_early(crashed: Path) -> None:
    with opened(crashed):
        pass
    for table in crashed.glob("*.sst"):
        flip(table, table.stat().st_size // 3)
    with opened(crashed) as store, pytest.raises(StoreCorrupt, match="block checksum mismatch"):
        store.scan(Family.JOBS, b"", LAST, 1 << 30)


def test_a_mark_that_is_damaged_says_nothing(crashed: Path) -> None:
    flip(crashed / "durable-sequence", 7)
    with opened(crashed) as store:
        assert len(batches_in(store)) >= 200


def test_a_buffering_store_may_lose_the_end_of_its_log_and_opens(tmp_path: Path) -> None:
    with opened(tmp_path / "shard", "buffer") as store:
        fill(store, b"a")
        store.sync()
        fill(store, b"b")
        shutil.copytree(tmp_path / "shard", tmp_path / "lost")
    os.truncate(log_of(tmp_path / "lost"), 0)
    with opened(tmp_path / "lost", "buffer") as store:
        assert keys_in(store) == []


def test_a_store_opens_with_every_option_set(tmp_path: Path) -> None:
    options = StoreOptions("sync_data", cache_size_bytes=1 << 20, max_open_files=64, background_threads=3)
    store = RocksStore.open(tmp_path / "deep" / "shard", options)
    fill(store, b"a")
    store.close()
    with opened(tmp_path / "deep" / "shard") as again:
        assert keys_in(again) == [b"a"]


def test_the_properties_of_a_new_store_tell_of_no_trouble(tmp_path: Path) -> None:
    with opened(tmp_path / "shard") as store:
        properties = store.properties()
    assert properties.pop("rocksdb.size-all-mem-tables") > 0
    assert set(properties.values()) == {0}


def test_a_directory_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "shard").write_text("a file")
    with pytest.raises(StoreError, match=r"preparing .*/shard failed: .*File exists"):
        RocksStore.open(tmp_path / "shard", StoreOptions())
