"""The supervisor as a process of its own, with small stand-ins for routers and shards.

A stand-in speaks control messages as plain JSON, reports all it hears to the journal, a datagram
socket of the test, and does what PLAN says for it: so a test waits for events, never for time. What a
test sends to the stand-in's own socket it says to the supervisor.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from common.slots import SlotMap

ROOT = Path(__file__).parents[2]
# A bound on waiting for something that is certain to come; no test is decided by it.
WAIT_S = 60.0

CHILD = """
import json, os, signal, socket, sys, threading
from contextlib import suppress

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
role, option, fd = sys.argv[1:]
assert option == "--control-fd"
control = socket.socket(fileno=int(fd))
journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
who = role
plan = {}


def report(message):
    entry = {"who": who, "pid": os.getpid(), **message}
    if "owners" in entry:
        owners = entry.pop("owners")
        entry["slots"] = [owners.count(shard) for shard in range(entry["shards"])]
    try:
        journal.connect(os.environ["JOURNAL"])
        journal.send(json.dumps(entry).encode())
    except OSError:
        pass


def say(message):
    control.sendall(json.dumps(message).encode() + b"\\n")


def leave(status):
    report({"kind": "exit"})
    os._exit(status)


def pass_on():
    # What a test has this child say.
    path = os.environ["JOURNAL"] + "." + who
    with suppress(FileNotFoundError):
        os.unlink(path)
    orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    orders.bind(path)

    def listen():
        while True:
            control.sendall(orders.recv(1 << 20) + b"\\n")

    threading.Thread(target=listen, daemon=True).start()


def wait(when):
    # For a SIGUSR1 of the test.
    if when in plan.get("wait", []):
        signal.sigwait({signal.SIGUSR1})


for line in control.makefile("rb"):
    message = json.loads(line)
    kind = message["kind"]
    if kind.startswith("start_"):
        who = f"{role}-{message['index']}"
        plan = json.loads(os.environ["PLAN"]).get(who, {})
        pass_on()
    report(message)
    if kind.startswith("start_"):
        wait("ready")
        if "fatal" in plan:
            say({"kind": "fatal", "text": plan["fatal"]})
        if "exit" in plan:
            os._exit(plan["exit"])
        if "junk" in plan:
            control.sendall(b"junk\\n")
        say({"kind": "ready"})
    elif kind in plan.get("ignore", []):
        pass
    elif kind == "serving":
        say({"kind": "served"})
    elif kind in ("drain", "stop"):
        wait("end")
        leave(plan.get("status", 0))
report({"kind": "end"})
if "linger" in plan:
    signal.sigwait({signal.SIGUSR1})
leave(0)
"""

SUPERVISOR = """
import json, os
from common.children import ChildTerms
from common.cli import main

terms = json.loads(os.environ["TERMS"])
main(["serve"], ChildTerms(**{name: tuple(v) if isinstance(v, list) else v for name, v in terms.items()}))
"""

Entry = dict[str, Any]


class Record:
    """A growing list of entries that a test can wait on."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._grown = threading.Condition()
        self._is_over = False

    def add(self, entry: Entry) -> None:
        with self._grown:
            self.entries.append(entry)
            self._grown.notify_all()

    def end(self) -> None:
        with self._grown:
            self._is_over = True
            self._grown.notify_all()

    def wait_for(self, matches: Callable[[Entry], bool], after: int = 0, count: int = 1) -> list[Entry]:
        """The first `count` entries from position `after` on that match."""
        with self._grown:
            done = self._grown.wait_for(lambda: len(self.matching(matches, after)) >= count or self._is_over, WAIT_S)
            found = self.matching(matches, after)[:count]
            assert done and len(found) == count, self.entries
            return found

    def matching(self, matches: Callable[[Entry], bool], after: int = 0) -> list[Entry]:
        return [entry for entry in self.entries[after:] if matches(entry)]


def has(**fields: object) -> Callable[[Entry], bool]:
    return lambda entry: all(entry.get(name) == value for name, value in fields.items())


class World:
    """A data directory, a journal, and the servers that a test starts on them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.data = home / "data"
        self.run = home / "run"
        self.run.mkdir()
        (home / "child.py").write_text(CHILD)
        self.journal = Record()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(home / "journal"))
        self._reader = threading.Thread(target=self._read_journal)
        self._reader.start()
        self.servers: list[Server] = []

    def start(
        self, plan: dict[str, Any] | None = None, terms: dict[str, Any] | None = None, **settings: object
    ) -> Server:
        child = [sys.executable, "-S", str(self.home / "child.py")]
        keys = {"listen_addr": "127.0.0.1:0", "db_path": self.data, "shards": 2, "routers": 2, **settings}
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SEPP_")}
        environ |= {f"SEPP_SERVER__{name.upper()}": str(value) for name, value in keys.items() if value is not None}
        environ |= {
            "PYTHONPATH": str(ROOT),
            "XDG_RUNTIME_DIR": str(self.run),
            "SEPP_LOGGING__FORMAT": "json",
            "SEPP_LOGGING__LEVEL": "debug",
            "JOURNAL": str(self.home / "journal"),
            "PLAN": json.dumps(plan or {}),
            "TERMS": json.dumps({"router": [*child, "router"], "shard": [*child, "shard"], **(terms or {})}),
        }
        server = Server(environ, self.home)
        self.servers.append(server)
        return server

    def close(self) -> None:
        for server in self.servers:
            server.kill()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()
        for entry in self.journal.entries:  # children of killed supervisors that a failed test left waiting
            with suppress(OSError):
                if str(self.home) in Path(f"/proc/{entry['pid']}/cmdline").read_text():
                    os.kill(entry["pid"], signal.SIGKILL)
        for server in self.servers:
            server.close()

    def _read_journal(self) -> None:
        while entry := self._socket.recv(1 << 20):
            self.journal.add(json.loads(entry))
        self.journal.end()

    # -- what tests ask for -----------------------------------------------------------------------

    def say(self, who: str, kind: str, **fields: object) -> None:
        """Have a child that has its start message say something to the supervisor."""
        self._socket.sendto(json.dumps({"kind": kind, **fields}).encode(), str(self.home / f"journal.{who}"))

    def generation_of(self, shard: str, after: int = 0) -> int:
        generation: int = self.heard(shard, "start_shard", after)["generation"]
        return generation

    def commit(self, slots: list[int], target: int, **fields: object) -> None:
        """Have router 0 ask for the last step of a move, by the shards' first processes unless given otherwise."""
        source = SlotMap.load(self.data)
        assert source is not None
        generations = {
            "source_generation": self.generation_of(f"shard-{source.owners[slots[0]]}"),
            "target_generation": self.generation_of(f"shard-{target}") if target < 2 else 0,
        }
        self.say("router-0", "commit_move", **{"request": 1, "slots": slots, "target": target, **generations, **fields})

    def stored_map(self) -> SlotMap:
        found = SlotMap.load(self.data)
        assert found is not None
        return found

    def shard_directories(self) -> list[str]:
        return sorted(path.name for path in self.data.glob("shard-*"))

    def heard(self, who: str, kind: str, after: int = 0) -> Entry:
        return self.journal.wait_for(has(who=who, kind=kind), after)[0]

    def lock(self) -> Entry:
        entry: Entry = json.loads((self.data / "LOCK").read_text())
        return entry

    def is_locked(self) -> bool:
        with (self.data / "LOCK").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False


class Server:
    """A supervisor process, and its log line by line."""

    def __init__(self, environ: dict[str, str], directory: Path) -> None:
        self.log = Record()
        command = [sys.executable, "-c", SUPERVISOR]
        self.process = subprocess.Popen(command, env=environ, cwd=directory, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.add(json.loads(line) if line.startswith("{") else {"line": line.rstrip("\n")})
        self.log.end()

    def wait_until_listening(self) -> Entry:
        return self.log.wait_for(has(event="queue server listening"))[0]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_status(self) -> int:
        return self.process.wait(WAIT_S)

    def plain_lines(self) -> list[str]:
        """What is on stderr beside the log, once the process and its children have ended."""
        self._reader.join(WAIT_S)
        return [entry["line"] for entry in self.log.entries if "line" in entry]

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)

    def close(self) -> None:
        self._reader.join(WAIT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()


def wait_until_gone(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], WAIT_S)[0], f"process {pid} has not ended"
    finally:
        os.close(fd)


@pytest.fixture
def world() -> Iterator[World]:
    # Not tmp_path: its names are too long for sockets.
    home = Path(tempfile.mkdtemp(prefix="sepp-", dir="/tmp"))
    world = World(home)
    yield world
    world.close()
    shutil.rmtree(home, ignore_errors=True)


EVERYBODY = ("router-0", "router-1", "shard-0", "shard-1")
SHARDS = EVERYBODY[2:]
ROUTERS = EVERYBODY[:2]


# -- start ----------------------------------------------------------------------------------------


def test_the_server_tells_where_it_listens_when_all_children_are_ready(world: World) -> None:
    server = world.start()
    line = server.wait_until_listening()
    assert {name: line[name] for name in ("level", "process", "shards", "routers", "db_path", "version", "pid")} == {
        "level": "info",
        "process": "supervisor",
        "shards": 2,
        "routers": 2,
        "db_path": str(world.data.resolve()),
        "version": "0.1.0",
        "pid": server.process.pid,
    }
    assert world.heard("router-0", "start_router")["listen"] == line["address"]


def test_routers_are_serving_only_when_the_last_child_is_ready(world: World) -> None:
    server = world.start({"shard-1": {"wait": ["ready"]}})
    late = world.heard("shard-1", "start_shard")
    server.log.wait_for(has(event="child is ready"), count=3)
    assert world.journal.matching(has(kind="serving")) == []
    os.kill(late["pid"], signal.SIGUSR1)
    server.wait_until_listening()
    for router in ROUTERS:
        world.heard(router, "serving")


def test_every_router_hears_of_every_shard_once_before_it_serves(world: World) -> None:
    world.start().wait_until_listening()
    addresses = {
        (index, start["generation"], start["address"])
        for index in range(2)
        for start in [world.heard(f"shard-{index}", "start_shard")]
    }
    for router in ROUTERS:
        world.heard(router, "serving")
        own = world.journal.matching(has(who=router))
        heard = [*own[0]["up"], *(entry for entry in own if entry["kind"] == "shard_up")]
        assert len(heard) == 2
        assert {(entry["index"], entry["generation"], entry["address"]) for entry in heard} == addresses


def test_a_shard_is_told_its_directory_its_socket_and_the_slot_map(world: World) -> None:
    world.start(shards=1).wait_until_listening()
    start = world.heard("shard-0", "start_shard")
    assert (start["name"], start["directory"]) == ("shard-0", str(world.data.resolve() / "shard-0"))
    assert start["address"] == f"ipc://{world.lock()['runtime']}/s0-{start['generation']}"
    assert (start["epoch"], start["shards"], start["config"]["server"]["shards"]) == (1, 1, 1)


def test_every_child_gets_a_number_of_its_own(world: World) -> None:
    world.start().wait_until_listening()
    shards = {world.heard(shard, "start_shard")["generation"] for shard in SHARDS}
    names = [world.heard(router, "start_router")["name"] for router in ROUTERS]
    assert [name.split("-")[0] for name in names] == ["r0", "r1"]
    assert len(shards | {int(name.split("-")[1]) for name in names}) == 4


def test_a_child_is_the_leader_of_its_own_session(world: World) -> None:
    world.start().wait_until_listening()
    pid = world.heard("shard-0", "start_shard")["pid"]
    assert os.getsid(pid) == pid


def test_a_data_directory_may_lie_deeper_than_a_socket_path_is_long(world: World) -> None:
    deep = world.home / ("d" * 120) / ("e" * 120)
    world.start(db_path=deep).wait_until_listening()
    assert len(world.heard("shard-0", "start_shard")["address"].removeprefix("ipc://")) <= 107
    assert stat.S_IMODE(deep.stat().st_mode) == 0o700


def test_port_0_is_one_port_for_all_routers(world: World) -> None:
    address = world.start().wait_until_listening()["address"]
    assert int(address.removeprefix("127.0.0.1:")) > 0
    assert {world.heard(router, "start_router")["listen"] for router in ROUTERS} == {address}


def test_a_taken_port_is_one_line_and_status_1(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        server = world.start(listen_addr=address)
        assert server.exit_status() == 1
    assert server.plain_lines() == [
        f"seppd: listen address {address} is in use by another process; stop it or choose another server.listen_addr"
    ]
    assert world.journal.entries == []


def test_a_fatal_child_at_the_start_ends_everything_with_its_line(world: World) -> None:
    server = world.start({"shard-1": {"fatal": "the disk is\nfull; make room", "exit": 3}})
    assert server.exit_status() == 1
    assert server.plain_lines() == ["seppd: shard-1: the disk is full; make room"]
    assert [entry for entry in server.log.entries if entry.get("level") not in (None, "debug")] == []
    assert list(world.run.iterdir()) == []
    for entry in world.journal.entries:
        wait_until_gone(entry["pid"])


def test_a_child_that_dies_silently_at_the_start_ends_everything_with_a_line(world: World) -> None:
    server = world.start({"router-0": {"exit": 3}})
    assert server.exit_status() == 1
    assert server.plain_lines() == ["seppd: router-0: ended with status 3, see its log above"]


def test_a_command_that_does_not_exist_is_one_line_and_status_1(world: World) -> None:
    server = world.start(terms={"shard": ["/no/such/program"]})
    assert server.exit_status() == 1
    (line,) = server.plain_lines()
    assert line.startswith("seppd: shard-0: cannot be started: ") and "/no/such/program" in line


def test_another_number_of_shards_is_one_line_and_status_1(world: World) -> None:
    first = world.start(shards=2)
    first.wait_until_listening()
    first.signal(signal.SIGTERM)
    assert first.exit_status() == 0
    second = world.start(shards=3)
    assert second.exit_status() == 1
    assert second.plain_lines() == [
        f"seppd: server.shards is 3, but {world.data.resolve()} has 2 shards; run `seppd rebalance apply --shards 3`, "
        "set server.shards to 2, or leave it out"
    ]


# -- restarts -------------------------------------------------------------------------------------


def test_a_killed_shard_comes_back_with_a_larger_generation_and_routers_hear_both(world: World) -> None:
    world.start().wait_until_listening()
    old = world.heard("shard-0", "start_shard")
    mark = len(world.journal.entries)
    os.kill(old["pid"], signal.SIGKILL)
    new = world.heard("shard-0", "start_shard", mark)
    assert new["generation"] > old["generation"]
    assert new["address"] != old["address"]
    for router in ROUTERS:
        down = world.heard(router, "shard_down", mark)
        assert (down["index"], down["generation"]) == (0, old["generation"])
        after = world.journal.entries.index(down)
        up = world.heard(router, "shard_up", after)
        assert (up["index"], up["generation"], up["address"]) == (0, new["generation"], new["address"])


def test_a_killed_router_comes_back_with_a_new_name_and_shards_hear_of_its_end(world: World) -> None:
    world.start().wait_until_listening()
    old = world.heard("router-1", "start_router")
    shards = {world.heard(shard, "start_shard")["generation"] for shard in SHARDS}
    mark = len(world.journal.entries)
    os.kill(old["pid"], signal.SIGKILL)
    new = world.heard("router-1", "start_router", mark)
    assert new["name"].startswith("r1-") and new["name"] != old["name"]
    assert new["address"] != old["address"]
    assert new["listen"] == old["listen"]
    assert {up["generation"] for up in new["up"]} == shards
    world.heard("router-1", "serving", mark)
    for shard in SHARDS:
        assert world.heard(shard, "router_down", mark)["name"] == old["name"]


def test_a_shard_that_dies_again_and_again_is_started_with_growing_delays(world: World) -> None:
    server = world.start()
    server.wait_until_listening()
    mark = 0
    for _ in range(3):
        start = world.heard("shard-0", "start_shard", mark)
        mark = world.journal.entries.index(start) + 1
        os.kill(start["pid"], signal.SIGKILL)
    again = server.log.wait_for(has(event="child is started again"), count=3)
    assert [entry["delay_s"] for entry in again] == [0.0, 0.1, 0.2]


def test_a_fatal_child_is_started_again_once_the_server_serves(world: World) -> None:
    server = world.start()
    server.wait_until_listening()
    old = world.heard("router-0", "start_router")
    mark = len(world.journal.entries)
    os.kill(old["pid"], signal.SIGKILL)
    world.heard("router-0", "serving", mark)
    (ended,) = server.log.wait_for(has(event="child ended"))
    assert (ended["child"], ended["reason"]) == ("router-0", "killed by signal 9, see its log above")
    assert server.process.poll() is None


def test_a_child_that_sends_junk_is_killed(world: World) -> None:
    server = world.start({"shard-0": {"junk": True}})
    assert server.exit_status() == 1
    (line,) = server.plain_lines()
    assert line.startswith("seppd: shard-0: was killed: not a control message: ")


def test_generations_grow_over_the_lives_of_a_server(world: World) -> None:
    generations = []
    for _ in range(2):
        mark = len(world.journal.entries)
        server = world.start(shards=1, routers=1)
        server.wait_until_listening()
        generations.append(world.heard("shard-0", "start_shard", mark)["generation"])
        server.signal(signal.SIGTERM)
        assert server.exit_status() == 0
    assert generations[0] < generations[1]


# -- the slot map ---------------------------------------------------------------------------------


def test_a_committed_move_is_stored_and_everybody_hears_of_it(world: World) -> None:
    world.start().wait_until_listening()
    world.commit([0, 2, 4], 1)
    for who in EVERYBODY:
        changed = world.heard(who, "slot_map")
        assert (changed["epoch"], changed["shards"], changed["slots"]) == (2, 2, [2_045, 2_051])
    assert world.stored_map() == SlotMap.even(2).moved([0, 2, 4], 1)


def test_a_process_that_is_started_after_a_move_gets_the_new_map(world: World) -> None:
    world.start().wait_until_listening()
    world.commit([0], 1)
    world.heard("router-1", "slot_map")
    mark = len(world.journal.entries)
    for who, kind in (("shard-0", "start_shard"), ("router-1", "start_router")):
        os.kill(world.heard(who, kind)["pid"], signal.SIGKILL)
        start = world.heard(who, kind, mark)
        assert (start["epoch"], start["slots"]) == (2, [2_047, 2_049])


@pytest.mark.parametrize("who", SHARDS)
def test_a_move_is_not_committed_when_one_of_its_shards_was_started_again(world: World, who: str) -> None:
    world.start().wait_until_listening()
    mark = len(world.journal.entries)
    os.kill(world.heard(who, "start_shard")["pid"], signal.SIGKILL)
    world.heard("router-0", "shard_up", mark)
    world.commit([0], 1, request=7)
    refused = world.heard("router-0", "map_refused")
    assert (refused["request"], refused["text"]) == (
        7,
        f"shard {who[-1]} was started again during the move; move the slots again",
    )
    assert world.stored_map() == SlotMap.even(2)


@pytest.mark.parametrize(
    ("slots", "target", "text"),
    [
        ([0, 1], 1, "the slots belong to several shards"),
        ([1], 1, "shard 1 cannot be given slots of shard 1"),
        ([1], 2, "shard 2 cannot be given slots of shard 1"),
        ([1, 4_096], 0, "these are no slots: [1, 4096]"),
    ],
)
def test_a_move_that_makes_no_sense_is_refused(world: World, slots: list[int], target: int, text: str) -> None:
    world.start().wait_until_listening()
    world.commit(slots, target)
    assert world.heard("router-0", "map_refused")["text"] == text
    assert world.stored_map() == SlotMap.even(2)
    assert world.journal.matching(has(kind="slot_map")) == []


def test_a_map_that_cannot_be_stored_is_refused_and_the_old_one_stays(world: World) -> None:
    world.start().wait_until_listening()
    in_the_way = world.data / "slots.json.new"
    in_the_way.mkdir()
    world.commit([0], 1)
    text = world.heard("router-0", "map_refused")["text"]
    assert text.startswith(f"{world.data.resolve()} cannot be written (") and "make room there" in text
    in_the_way.rmdir()
    world.commit([0], 1)
    assert world.heard("shard-0", "slot_map")["epoch"] == 2


def test_added_shards_are_started_and_everybody_hears_of_them(world: World) -> None:
    server = world.start()
    server.wait_until_listening()
    world.say("router-0", "set_shards", request=1, shards=4)
    for who in EVERYBODY:
        changed = world.heard(who, "slot_map")
        assert (changed["epoch"], changed["shards"], changed["slots"]) == (2, 4, [2_048, 2_048, 0, 0])
    for index in (2, 3):
        start = world.heard(f"shard-{index}", "start_shard")
        assert (start["shards"], start["epoch"], start["directory"]) == (
            4,
            2,
            str(world.data.resolve() / f"shard-{index}"),
        )
        for router in ROUTERS:
            (up,) = world.journal.wait_for(has(who=router, kind="shard_up", index=index))
            assert up["generation"] == start["generation"]
    assert world.stored_map() == SlotMap.even(2).resized(4)
    server.signal(signal.SIGTERM)
    assert server.exit_status() == 0
    for index in range(4):
        world.heard(f"shard-{index}", "stop")


def test_an_added_shard_that_dies_is_started_again(world: World) -> None:
    world.start().wait_until_listening()
    world.say("router-0", "set_shards", request=1, shards=3)
    world.heard("router-0", "shard_up", world.journal.entries.index(world.heard("shard-2", "start_shard")))
    mark = len(world.journal.entries)
    os.kill(world.heard("shard-2", "start_shard")["pid"], signal.SIGKILL)
    assert world.heard("shard-2", "start_shard", mark)["shards"] == 3


def test_a_number_that_differs_from_the_configured_one_is_warned_of(world: World) -> None:
    server = world.start(shards=2)
    server.wait_until_listening()
    world.say("router-0", "set_shards", request=1, shards=3)
    (line,) = server.log.wait_for(lambda entry: str(entry.get("event")).startswith("server.shards is another number"))
    assert (line["level"], line["configured"], line["shards"]) == ("warning", 2, 3)


def without_slots_on_shard_1(world: World) -> Server:
    """A server whose second shard has nothing any more."""
    server = world.start({"shard-1": {"wait": ["end"]}}, shutdown_grace_ms=1_000)
    server.wait_until_listening()
    world.commit(SlotMap.even(2).slots_of(1), 0)
    world.heard("router-0", "slot_map")
    return server


def test_a_shard_that_is_taken_away_stops_and_its_directory_goes(world: World) -> None:
    server = without_slots_on_shard_1(world)
    (world.data / "shard-1" / "CURRENT").write_text("what is left")
    world.say("router-0", "set_shards", request=2, shards=1)
    for who in ("shard-0", *ROUTERS):
        (changed,) = world.journal.wait_for(has(who=who, kind="slot_map", epoch=3))
        assert (changed["shards"], changed["slots"]) == (1, [4_096])
    late = world.heard("shard-1", "stop")
    assert world.stored_map().shards == 1
    assert world.shard_directories() == ["shard-0", "shard-1"]
    os.kill(late["pid"], signal.SIGUSR1)
    server.log.wait_for(has(event="directory of a removed shard deleted"))
    wait_until_gone(late["pid"])
    assert world.shard_directories() == ["shard-0"]
    server.signal(signal.SIGTERM)
    assert server.exit_status() == 0


def test_a_shard_that_owns_slots_is_not_taken_away(world: World) -> None:
    world.start().wait_until_listening()
    world.say("router-0", "set_shards", request=2, shards=1)
    refused = world.heard("router-0", "map_refused")
    assert (refused["request"], refused["text"]) == (
        2,
        "there cannot be 1 shards while shard 1 owns slots; move them away first",
    )
    assert world.stored_map() == SlotMap.even(2)


@pytest.mark.parametrize("shards", [0, 2, 65])
def test_a_number_that_cannot_be_is_refused(world: World, shards: int) -> None:
    world.start().wait_until_listening()
    world.say("router-0", "set_shards", request=2, shards=shards)
    assert world.heard("router-0", "map_refused")["request"] == 2


def test_the_number_does_not_change_again_while_a_shard_is_still_ending(world: World) -> None:
    server = without_slots_on_shard_1(world)
    world.say("router-0", "set_shards", request=2, shards=1)
    late = world.heard("shard-1", "stop")
    world.say("router-0", "set_shards", request=3, shards=2)
    refused = world.heard("router-0", "map_refused")
    assert (refused["request"], refused["text"]) == (3, "shards that were taken away are still ending; try again later")
    os.kill(late["pid"], signal.SIGUSR1)
    server.log.wait_for(has(event="directory of a removed shard deleted"))
    mark = len(world.journal.entries)
    world.say("router-0", "set_shards", request=4, shards=2)
    assert world.heard("shard-1", "start_shard", mark)["epoch"] == 4


def test_a_shard_that_is_taken_away_and_does_not_stop_is_killed(world: World) -> None:
    server = world.start({"shard-1": {"ignore": ["stop"]}}, {"shard_stop_s": 0.2})
    server.wait_until_listening()
    world.commit(SlotMap.even(2).slots_of(1), 0)
    world.heard("router-0", "slot_map")
    world.say("router-0", "set_shards", request=2, shards=1)
    server.log.wait_for(has(event="child did not end in time and is killed", child="shard-1"))
    server.log.wait_for(has(event="directory of a removed shard deleted"))
    server.signal(signal.SIGTERM)
    assert server.exit_status() == 0


def test_a_server_that_is_stopped_waits_for_a_shard_that_is_being_taken_away(world: World) -> None:
    server = without_slots_on_shard_1(world)
    world.say("router-0", "set_shards", request=2, shards=1)
    late = world.heard("shard-1", "stop")
    server.signal(signal.SIGTERM)
    world.heard("shard-0", "exit")
    os.kill(late["pid"], signal.SIGUSR1)
    assert server.exit_status() == 0
    assert world.shard_directories() == ["shard-0"]


def test_what_a_crash_leaves_of_a_shard_that_was_taken_away_goes_at_the_next_start(world: World) -> None:
    first = without_slots_on_shard_1(world)
    world.say("router-0", "set_shards", request=2, shards=1)
    late = world.heard("shard-1", "stop")
    first.signal(signal.SIGKILL)
    first.exit_status()
    os.kill(late["pid"], signal.SIGUSR1)
    wait_until_gone(late["pid"])
    assert world.shard_directories() == ["shard-0", "shard-1"]
    second = world.start(shards=1)
    second.wait_until_listening()
    assert len(second.log.matching(has(event="directory of a removed shard deleted"))) == 1
    assert world.shard_directories() == ["shard-0"]


# -- stop -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_routers_end_before_shards_are_told_to_stop(world: World, number: signal.Signals) -> None:
    server = world.start({"router-1": {"wait": ["end"]}}, shutdown_grace_ms=45_000)
    server.wait_until_listening()
    server.signal(number)
    late = world.heard("router-1", "drain")
    assert late["grace_ms"] == 45_000
    world.heard("shard-0", "router_down")  # of router-0, which has ended
    assert world.journal.matching(has(kind="stop")) == []
    os.kill(late["pid"], signal.SIGUSR1)
    assert server.exit_status() == 0
    for shard in SHARDS:
        kinds = [entry["kind"] for entry in world.journal.matching(has(who=shard)) if entry["kind"] != "router_up"]
        assert kinds == ["start_shard", "router_down", "router_down", "stop", "exit"]


def test_a_stopped_server_leaves_no_child_no_lock_and_no_runtime_directory(world: World) -> None:
    server = world.start()
    server.wait_until_listening()
    server.signal(signal.SIGTERM)
    assert server.exit_status() == 0
    for who in EVERYBODY:
        wait_until_gone(world.journal.wait_for(has(who=who))[0]["pid"])
    assert not world.is_locked()
    assert list(world.run.iterdir()) == []
    assert server.plain_lines() == []


def test_a_second_sigterm_changes_nothing(world: World) -> None:
    server = world.start({"router-0": {"wait": ["end"]}})
    server.wait_until_listening()
    server.signal(signal.SIGTERM)
    late = world.heard("router-0", "drain")
    server.signal(signal.SIGTERM)
    server.log.wait_for(has(event="already stopping"))
    os.kill(late["pid"], signal.SIGUSR1)
    assert server.exit_status() == 0
    assert len(world.journal.matching(has(kind="drain"))) == 2
    assert len(world.journal.matching(has(kind="stop"))) == 2


def test_sigterm_during_the_start_is_an_orderly_stop(world: World) -> None:
    server = world.start({"shard-0": {"wait": ["ready"]}})
    late = world.heard("shard-0", "start_shard")
    server.signal(signal.SIGTERM)
    server.log.wait_for(has(event="stopping"))
    os.kill(late["pid"], signal.SIGUSR1)
    assert server.exit_status() == 0
    assert server.plain_lines() == []


def test_a_router_that_ignores_the_drain_is_killed_after_the_grace(world: World) -> None:
    server = world.start({"router-0": {"ignore": ["drain"]}}, {"router_stop_s": 0.2}, shutdown_grace_ms=100)
    server.wait_until_listening()
    server.signal(signal.SIGTERM)
    assert server.exit_status() == 0
    (line,) = server.log.matching(has(event="child did not end in time and is killed"))
    assert (line["child"], line["limit_s"]) == ("router-0", pytest.approx(0.3))
    assert len(world.journal.matching(has(kind="stop"))) == 2


def test_a_shard_that_does_not_stop_is_killed_and_the_status_is_1(world: World) -> None:
    server = world.start({"shard-1": {"ignore": ["stop"]}}, {"shard_stop_s": 0.2})
    server.wait_until_listening()
    server.signal(signal.SIGTERM)
    assert server.exit_status() == 1
    (line,) = server.log.matching(has(event="child did not end in time and is killed"))
    assert line["child"] == "shard-1"


def test_a_shard_that_fails_while_it_stops_makes_the_status_1(world: World) -> None:
    server = world.start({"shard-1": {"status": 4}})
    server.wait_until_listening()
    server.signal(signal.SIGTERM)
    assert server.exit_status() == 1


def test_a_shard_that_dies_while_routers_drain_is_started_again(world: World) -> None:
    server = world.start({"router-0": {"wait": ["end"]}})
    server.wait_until_listening()
    server.signal(signal.SIGTERM)
    late = world.heard("router-0", "drain")
    mark = len(world.journal.entries)
    os.kill(world.heard("shard-0", "start_shard")["pid"], signal.SIGKILL)
    world.heard("shard-0", "start_shard", mark)
    os.kill(late["pid"], signal.SIGUSR1)
    assert server.exit_status() == 0


def test_a_router_that_dies_while_it_drains_is_not_started_again(world: World) -> None:
    server = world.start({"router-0": {"wait": ["end"]}})
    server.wait_until_listening()
    server.signal(signal.SIGTERM)
    os.kill(world.heard("router-0", "drain")["pid"], signal.SIGKILL)
    assert server.exit_status() == 0
    assert len(world.journal.matching(has(who="router-0", kind="start_router"))) == 1


# -- a killed supervisor --------------------------------------------------------------------------


def test_children_end_when_the_supervisor_is_killed(world: World) -> None:
    server = world.start()
    server.wait_until_listening()
    server.signal(signal.SIGKILL)
    for who in EVERYBODY:
        wait_until_gone(world.heard(who, "end")["pid"])


def test_a_held_data_directory_is_one_line_that_names_the_holder(world: World) -> None:
    first = world.start()
    first.wait_until_listening()
    second = world.start()
    assert second.exit_status() == 1
    assert second.plain_lines() == [
        f"seppd: server.db_path {world.data.resolve()} is in use by process {first.process.pid}; "
        "stop it or choose another server.db_path"
    ]


def test_the_lock_is_held_until_the_last_child_of_a_killed_supervisor_has_ended(world: World) -> None:
    server = world.start({"shard-0": {"linger": True}})
    server.wait_until_listening()
    server.signal(signal.SIGKILL)
    late = world.heard("shard-0", "end")
    for who in EVERYBODY:
        if who != "shard-0":
            wait_until_gone(world.heard(who, "end")["pid"])
    assert world.is_locked()
    os.kill(late["pid"], signal.SIGUSR1)
    wait_until_gone(late["pid"])
    assert not world.is_locked()


def test_a_start_waits_for_the_children_of_a_killed_supervisor(world: World) -> None:
    first = world.start({"shard-0": {"linger": True}})
    first.wait_until_listening()
    first.signal(signal.SIGKILL)
    first.exit_status()
    late = world.heard("shard-0", "end")
    second = world.start()
    os.kill(late["pid"], signal.SIGUSR1)
    second.wait_until_listening()


def test_the_runtime_directory_of_a_killed_supervisor_is_removed_by_the_next_start(world: World) -> None:
    first = world.start()
    first.wait_until_listening()
    left = Path(world.lock()["runtime"])
    first.signal(signal.SIGKILL)
    first.exit_status()
    assert list(world.run.iterdir()) == [left]
    world.start().wait_until_listening()
    assert list(world.run.iterdir()) == [Path(world.lock()["runtime"])]
    assert not left.exists()


# -- reload ---------------------------------------------------------------------------------------


def test_sighup_gives_every_child_the_new_live_values(world: World) -> None:
    server = world.start()
    server.wait_until_listening()
    (world.home / "sepp.toml").write_text("[limits]\nmax_reserve_batch = 7\nmax_message_bytes = 9000000\n")
    server.signal(signal.SIGHUP)
    for who in EVERYBODY:
        limits = world.heard(who, "config")["config"]["limits"]
        assert (limits["max_reserve_batch"], limits["max_message_bytes"]) == (7, 16_777_216)
    (line,) = server.log.wait_for(has(event="changed keys that need a restart keep their running values"))
    assert line["keys"] == ["limits.max_message_bytes"]


def test_a_broken_configuration_is_logged_and_changes_nothing(world: World) -> None:
    server = world.start()
    server.wait_until_listening()
    (world.home / "sepp.toml").write_text("[limits]\nmax_reserve_batch = 0\n")
    server.signal(signal.SIGHUP)
    (line,) = server.log.wait_for(has(event="configuration not reloaded, the running one stays"))
    assert "limits.max_reserve_batch is 0" in line["reason"]
    assert world.journal.matching(has(kind="config")) == []
