"""The store on RocksDB, one database for each shard, a column family for each family.

A write appends to the write-ahead log and never waits for the disk; `sync` flushes that log, and lets
go of the GIL while it does, which `Rdict.write` with its own sync does not. Options and detours are
there because of what rocksdict 0.3.29 was measured to do:

- A stalled write would hold the GIL, so `no_slowdown` refuses it instead, and it becomes StoreBusy.
- An iterator points into the bytes of its upper bound without owning them; a lower bound overwrites
  the upper one; and an iterator that ends by an error only says so through `status()`.
- Objects of column families flush memtables when they are dropped: they are kept until `close`.
- Failures are bare `Exception`s, told apart by how their text begins.
- After a failed write or sync the database refuses all others: so does the store, until it is reopened.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zlib import crc32

from rocksdict import (
    BlockBasedOptions,
    Cache,
    DBCompactionStyle,
    DBRecoveryMode,
    Options,
    Rdict,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from shard.store import Family, Store, StoreBusy, StoreCorrupt, StoreError

PersistMode = Literal["sync_all", "sync_data", "buffer"]

# Families that are filled at one end and emptied at the other: their deletions must not pile up.
QUEUE_LIKE = frozenset({Family.JOBS, Family.SCHEDULED, Family.LEASES, Family.DEDUP_EXPIRY})
# Families that are asked for keys which are often not there. 10 bits a key answer 99 of 100 such
# questions without a read.
LOOKED_UP = frozenset({Family.LEASES, Family.DEDUP})
BLOOM_BITS_PER_KEY = 10
# A deletion in a memtable slows a scan until it is flushed, so the queue-like families have small ones.
# Not smaller still: large payloads fill them too, and a switch to the next one can wait for a sync.
QUEUE_MEMTABLE_BYTES = 8 << 20
MEMTABLE_BYTES = 16 << 20
# Memtables of a family that may wait for their flush before writes are refused, the one in use among them.
MEMTABLES_MAX = 6
# RocksDB's own default for one family; here all families share it.
CACHE_BYTES = 32 << 20
# Bounds both what a start has to replay, with the GIL held, and the log that one idle family can pin.
WAL_BYTES_MAX = 64 << 20
# A file with this many deletions among so many neighbouring entries is compacted at once.
DELETIONS_WINDOW = 1024
DELETIONS_TRIGGER = 512
# RocksDB's log of its own doings, one file for each start unless it is told otherwise.
INFO_LOG_FILES = 4
INFO_LOG_BYTES = 16 << 20

DATABASE_PROPERTIES = ("rocksdb.background-errors", "rocksdb.is-write-stopped", "rocksdb.num-snapshots")
# Added up over the families.
FAMILY_PROPERTIES = (
    "rocksdb.estimate-pending-compaction-bytes",
    "rocksdb.num-immutable-mem-table",
    "rocksdb.size-all-mem-tables",
)


@dataclass(frozen=True)
class StoreOptions:
    """The [storage] part of the configuration that RocksDB is told of; None leaves RocksDB's default."""

    persist_mode: PersistMode = "sync_all"
    cache_size_bytes: int | None = None
    max_open_files: int | None = None
    background_threads: int | None = None


class RocksStore(Store):
    """A store in a directory of its own. `sync` may run in one other thread, all else in one thread."""

    def __init__(self, directory: Path, options: StoreOptions) -> None:
        """See `open`."""
        super().__init__()
        self._directory = directory
        # A process that crashes loses nothing of what the kernel has, and every write goes there.
        self._syncs = options.persist_mode != "buffer"
        self._write_options = WriteOptions()
        self._write_options.no_slowdown = True
        try:
            _make_directory(directory)
            _refuse_headless(directory)
        except OSError as error:
            raise _failed(directory, "preparing", error) from error
        self._database = _open_database(directory, options)
        self._families = [self._database.get_column_family(_name(family)) for family in Family]
        self._handles = [self._database.get_column_family_handle(_name(family)) for family in Family]
        # Opening flushes and syncs what it replayed, so all that was found is durable.
        self._durable_sequence = self._database.latest_sequence_number()
        try:
            self._mark = _DurableMark(directory, self._durable_sequence, kept=self._syncs)
        except BaseException:
            self._release()
            raise

    @classmethod
    def open(cls, directory: Path, options: StoreOptions) -> RocksStore:
        """Open or create the store in `directory`; replays the log, during which the GIL is held.

        Raises StoreCorrupt when what is there is damaged, StoreError when another process holds it or
        it cannot be opened; the text is one line.
        """
        return cls(directory, options)

    # -- reads --------------------------------------------------------------------------------

    def _stored_value(self, family: Family, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._families[family].get(key)
        except Exception as error:
            raise _failed(self._directory, "reading", error) from error
        return value

    def _stored_pairs(self, family: Family, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        try:
            # `end` and `options` must live as long as `cursor`. Without the bound an empty range would be
            # left over the deletions of its neighbours.
            options = ReadOptions()
            options.set_iterate_upper_bound(end)
            cursor = self._families[family].iter(options)
            cursor.seek(start)
            while cursor.valid():
                yield cursor.key(), cursor.value()
                cursor.next()
            cursor.status()
        except Exception as error:
            raise _failed(self._directory, "reading", error) from error

    # -- the end of a turn --------------------------------------------------------------------

    def write(self) -> bool:
        self._refuse_after_failure()
        if not any(self.pending):
            return False
        batch = self._batch()
        try:
            self._mark.advance(self._durable_sequence)
            self._database.write(batch, self._write_options)
        except Exception as error:
            raise self._stop("writing", error) from error
        self._drop_pending()
        return True

    def _batch(self) -> WriteBatch:
        """The turn's changes. A batch can be used once, so a refused write builds it again."""
        batch = WriteBatch(raw_mode=True)
        for handle, changes in zip(self._handles, self.pending, strict=True):
            for key, value in changes.items():
                if value is None:
                    batch.delete(key, handle)
                else:
                    batch.put(key, value, handle)
        return batch

    def sync(self) -> None:
        self._refuse_after_failure()
        if self._syncs:
            self._flush_log()

    def _flush_log(self) -> None:
        try:
            written = self._database.latest_sequence_number()
            if written != self._durable_sequence:
                self._database.flush_wal(True)
                self._durable_sequence = written
        except Exception as error:
            raise self._stop("syncing", error) from error

    def _stop(self, doing: str, error: Exception) -> StoreError:
        """The failure to raise; unless the store was only busy, it is the end of writing."""
        failure = _failed(self._directory, doing, error)
        if not isinstance(failure, StoreBusy):
            self._failure = str(failure)
        return failure

    def close(self) -> None:
        if not self._families:
            return
        try:
            if self._failure is None:
                self._flush_log()
                self._mark.advance(self._durable_sequence)
        finally:
            self._failure = self._failure or f"the store in {self._directory} is closed"
            self._drop_pending()
            self._mark.close()
            self._release()

    def _release(self) -> None:
        """Let go of the database. Families and handles would each keep it, and its lock, if they stayed."""
        self._handles.clear()
        try:
            while self._families:
                self._families.pop().close()
            self._database.close()
        except Exception as error:
            self._families.clear()
            raise _failed(self._directory, "closing", error) from error

    def properties(self) -> dict[str, int]:
        """RocksDB's own numbers by their names, for metrics."""
        found = {name: self._database.property_int_value(name) or 0 for name in DATABASE_PROPERTIES}
        for name in FAMILY_PROPERTIES:
            found[name] = sum(family.property_int_value(name) or 0 for family in self._families)
        return found


# -- opening ----------------------------------------------------------------------------------


def _name(family: Family) -> str:
    return family.name.lower()


def _open_database(directory: Path, options: StoreOptions) -> Rdict:
    cache = Cache(CACHE_BYTES if options.cache_size_bytes is None else options.cache_size_bytes)
    families = {_name(family): _family_options(family, cache) for family in Family}
    # RocksDB insists on a family of this name; nothing is in it.
    families["default"] = _family_options(Family.META, cache)
    try:
        return Rdict(str(directory), _database_options(options), families)
    except Exception as error:
        raise _failed(directory, "opening", error) from error


def _database_options(options: StoreOptions) -> Options:
    database = Options(raw_mode=True)
    database.create_if_missing(True)
    database.create_missing_column_families(True)
    # Refuses a damaged log, but not one whose end was torn off, as a crash leaves it. Recycled log
    # files would make a sync cheaper, and are ruled out by this.
    database.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    database.set_max_total_wal_size(WAL_BYTES_MAX)
    database.set_use_fsync(options.persist_mode == "sync_all")
    database.set_keep_log_file_num(INFO_LOG_FILES)
    database.set_max_log_file_size(INFO_LOG_BYTES)
    if options.max_open_files is not None:
        database.set_max_open_files(options.max_open_files)
    if options.background_threads is not None:
        database.set_max_background_jobs(options.background_threads)
    return database


def _family_options(family: Family, cache: Cache) -> Options:
    table = BlockBasedOptions()
    table.set_block_cache(cache)
    # Indexes and filters grow with the backlog; outside of the cache nothing would bound them.
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    if family in LOOKED_UP:
        table.set_bloom_filter(BLOOM_BITS_PER_KEY, False)
    options = Options(raw_mode=True)
    options.set_block_based_table_factory(table)
    options.set_compaction_style(DBCompactionStyle.level())
    options.set_max_write_buffer_number(MEMTABLES_MAX)
    options.set_write_buffer_size(MEMTABLE_BYTES)
    if family in QUEUE_LIKE:
        options.set_write_buffer_size(QUEUE_MEMTABLE_BYTES)
        options.add_compact_on_deletion_collector_factory(DELETIONS_WINDOW, DELETIONS_TRIGGER, 0.5)
    return options


def _make_directory(directory: Path) -> None:
    """Create the directory and sync its name, or a power loss could take a new store away whole."""
    if directory.is_dir():
        return
    directory.mkdir(parents=True)
    parent = os.open(directory.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _refuse_headless(directory: Path) -> None:
    """Raise StoreCorrupt for data without its CURRENT file: RocksDB would begin anew and remove it."""
    if (directory / "CURRENT").exists():
        return
    if any(path.suffix in (".sst", ".log") for path in directory.iterdir()):
        raise _damaged(directory, "the file CURRENT is missing")


# -- the end of the log -----------------------------------------------------------------------


class _DurableMark:
    """A file that says up to which sequence number the log is known to be durable.

    In no recovery mode does RocksDB miss the end of its log: an emptied file is an empty log to it. The
    mark is never ahead of what was synced, and never waits for the disk itself; after a power loss it may
    be behind, which makes the check weaker, not wrong.
    """

    FILE = "durable-sequence"
    # The sequence number, and the CRC-32 of its eight bytes.
    LAYOUT = struct.Struct("<QI")

    def __init__(self, directory: Path, found: int, kept: bool) -> None:
        """Check what opening has `found`. A mark that is not `kept` is removed, and advances no more.

        Raises StoreCorrupt when the log ends before the mark, StoreError when the file cannot be used.
        """
        path = directory / self.FILE
        self._marked = found
        self._file = -1
        try:
            before = self._read(path)
            if found < before:
                raise _damaged(directory, f"the log ends at sequence number {found}, {before} was durable")
            if kept:
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
                self._overwrite(found)
            else:
                # What is only buffered may be lost with the host, the mark's own page may not.
                path.unlink(missing_ok=True)
        except OSError as error:
            raise _failed(directory, "marking", error) from error

    def advance(self, durable: int) -> None:
        """Raise the mark to a sequence number that a sync has reached. Raises OSError."""
        if durable != self._marked and self._file >= 0:
            self._overwrite(durable)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _overwrite(self, sequence: int) -> None:
        number = struct.pack("<Q", sequence)
        os.pwrite(self._file, number + struct.pack("<I", crc32(number)), 0)
        self._marked = sequence

    @classmethod
    def _read(cls, path: Path) -> int:
        """The mark, 0 when there is none or it is not whole: then it says nothing."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return 0
        if len(content) != cls.LAYOUT.size:
            return 0
        sequence, checksum = cls.LAYOUT.unpack(content)
        return int(sequence) if crc32(content[:8]) == checksum else 0


# -- failures ---------------------------------------------------------------------------------


def _failed(directory: Path, doing: str, error: Exception) -> StoreError:
    """What a failure means, by the beginning of its text: rocksdict has no classes of them."""
    text = " ".join(str(error).split())
    if text.startswith("Result incomplete: Write stall"):
        return StoreBusy(f"{directory} would stall the write")
    if text.startswith(("Corruption:", "IO error: No such file or directory")):
        return _damaged(directory, text)
    if "While lock file" in text or "lock hold by current process" in text:
        return StoreError(f"{directory} is in use by {_lock_holder(directory, text)}: {text}")
    return StoreError(f"{doing} {directory} failed: {text or repr(error)}")


def _damaged(directory: Path, what: str) -> StoreCorrupt:
    return StoreCorrupt(
        f"{directory} is damaged ({what}); restore this directory as a whole from a backup, "
        "or look into a copy of it with RocksDB's ldb tool (checkconsistency, dump_wal)"
    )


def _lock_holder(directory: Path, text: str) -> str:
    """Which process holds the database, as far as the kernel tells."""
    # Closing any descriptor of a file drops this process's own lock on it, so it must not hold one.
    if "lock hold by current process" in text:
        return "this process"
    question = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with (directory / "LOCK").open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
    except OSError as error:
        return f"another process ({errno.errorcode.get(error.errno or 0, 'unknown')})"
    kind, _, _, _, process = struct.unpack("hhqqi", answer)
    return f"process {process}" if kind != fcntl.F_UNLCK and process > 0 else "another process"
