"""What the commands of `seppd rebalance` print and refuse, against an admin socket with nothing behind it."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

import common.rebalance_offline as offline_module
from common import admin_pb2 as pb
from common import rebalance_cli
from common.admin_socket import SERVICE, SOCKET_FILE
from common.cli import main
from common.data_directory import DataDirectory
from common.rebalance import Share
from common.rebalance_lock import LOCK_FILE, rebalance_lock
from common.rebalance_output import duration, evenness, speed
from common.slots import SLOT_MAP_FILE, SlotMap, slot_of

MAIL = slot_of("mail")
# A bound on waiting for something that is certain to come.
WAIT_S = 60.0


class Refusal(Exception):
    """What a call is answered with."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass
class Behind:
    """What the socket answers from. `refusals` are given first, one for each move."""

    map: SlotMap
    loads: dict[int, tuple[int, int]] = field(default_factory=dict)
    queues: list[pb.Queue] = field(default_factory=list)
    steps: dict[int, list[pb.VerifyShardResponse]] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    no_loads: bool = False
    on_move: Callable[[], None] = lambda: None
    moves: list[pb.MoveSlotsRequest] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def ShowSlotMap(self, request: pb.ShowSlotMapRequest) -> pb.ShowSlotMapResponse:
        if request.with_loads and self.no_loads:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "shard 1 is down")
        loads = [pb.SlotLoad(slot=slot, jobs=jobs, bytes=size) for slot, (jobs, size) in self.loads.items()]
        return pb.ShowSlotMapResponse(
            epoch=self.map.epoch,
            shards=self.map.shards,
            owners=self.map.owners,
            loads=loads if request.with_loads else (),
        )

    def SetShards(self, request: pb.SetShardsRequest) -> pb.SetShardsResponse:
        self.map = self.map.resized(request.shards)
        return pb.SetShardsResponse(epoch=self.map.epoch)

    def MoveSlots(self, request: pb.MoveSlotsRequest) -> pb.MoveSlotsResponse:
        self.moves.append(request)
        self.on_move()
        if self.refusals:
            raise self.refusals.pop(0)
        self.map = self.map.moved(request.slots, request.to)
        size = sum(self.loads.get(slot, (0, 0))[1] for slot in request.slots)
        return pb.MoveSlotsResponse(epoch=self.map.epoch, records=9, bytes=size, hold_ms=len(request.slots))

    def VerifyShard(self, request: pb.VerifyShardRequest) -> pb.VerifyShardResponse:
        return self.steps[request.shard][int(request.cursor or b"0")]

    def ListShards(self, request: pb.ListShardsRequest) -> pb.ListShardsResponse:
        return pb.ListShardsResponse(shards=[pb.Shard(index=index, up=True) for index in range(self.map.shards)])

    def ListQueues(self, request: pb.ListQueuesRequest) -> pb.ListQueuesResponse:
        return pb.ListQueuesResponse(queues=self.queues)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        kinds = {
            "ShowSlotMap": pb.ShowSlotMapRequest,
            "SetShards": pb.SetShardsRequest,
            "MoveSlots": pb.MoveSlotsRequest,
            "VerifyShard": pb.VerifyShardRequest,
            "ListShards": pb.ListShardsRequest,
            "ListQueues": pb.ListQueuesRequest,
        }
        return {
            name: grpc.unary_unary_rpc_method_handler(
                self._answering(getattr(self, name)),
                request_deserializer=kind.FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
            for name, kind in kinds.items()
        }

    def _answering(self, method: Callable[[Any], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            self.calls.append(method.__name__)
            try:
                return method(request)
            except Refusal as refusal:
                context.abort(refusal.code, str(refusal))

        return answer


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Behind]:
    """What a socket in `tmp_path` answers from: two shards, as they are at first."""
    found = Behind(SlotMap.even(2))
    found.map.save(tmp_path)
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, found.handlers()),))
    descriptor = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    server.add_insecure_port(f"unix:/proc/self/fd/{descriptor}/{SOCKET_FILE}")
    server.start()
    yield found
    server.stop(None).wait()
    os.close(descriptor)


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


class Shell:
    """Runs `seppd rebalance` on a directory, in this process, with no configuration but the one given here."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self._patch = patch
        for name in os.environ:
            if name.startswith("SEPP_"):
                patch.delenv(name)
        patch.chdir(directory)

    def configure(self, **variables: str) -> None:
        for name, value in variables.items():
            self._patch.setenv(name, value)

    def run(self, *arguments: str) -> Outcome:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
            main(["rebalance", *arguments, "--db-path", str(self.directory)])
        assert isinstance(end.value.code, int)
        return Outcome(end.value.code, out.getvalue(), err.getvalue())

    def lines(self, *arguments: str) -> list[str]:
        """What a command that has to succeed prints."""
        outcome = self.run(*arguments)
        assert outcome.status == 0, outcome.err
        return outcome.out.splitlines()

    def plain(self, *arguments: str) -> Any:
        outcome = self.run(*arguments, "--json")
        assert outcome.status == 0, outcome.err
        return json.loads(outcome.out)

    def fails(self, *arguments: str) -> str:
        """The only line of a command that has to fail, without its `seppd: `."""
        outcome = self.run(*arguments)
        assert (outcome.status, outcome.out) == (1, "")
        assert outcome.err.startswith("seppd: ") and outcome.err.count("\n") == 1, outcome.err
        return outcome.err.removeprefix("seppd: ").rstrip("\n")


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(tmp_path, monkeypatch)


# -- plan and apply ---------------------------------------------------------------------------------


def test_a_plan_shows_each_shard_now_and_then(behind: Behind, shell: Shell) -> None:
    behind.loads = {0: (5, 2_000_000), 1: (7, 500_000)}
    outcome = shell.run("plan", "--shards", "1")
    assert outcome == Outcome(
        0,
        "from 2 to 1 shards: 2048 slots move, with 7 jobs and about 0.5 MB, in 32 batches; about 1 s\n"
        "shard  slots  then  jobs  then  MB   then\n"
        "0      2048   4096  5     12    2.0  2.5 \n"
        "1      2048   0     7     0     0.5  0.0 \n",
        "",
    )
    assert behind.moves == []


def test_a_plan_in_json_names_every_slot(behind: Behind, shell: Shell) -> None:
    behind.loads = {1: (7, 500_000)}
    found = shell.plain("plan", "--shards", "1", "--rate-limit", "0.1")
    slots = [slot for batch in found.pop("batches") for slot in batch["slots"]]
    assert slots == list(range(1, 4096, 2))
    seconds = found.pop("seconds")
    assert 5 < seconds < 10
    assert found == {
        "epoch": 1,
        "shards": 2,
        "shards_after": 1,
        "slots": 2048,
        "jobs": 7,
        "bytes": 500_000,
        "before": [
            {"shard": 0, "slots": 2048, "jobs": 0, "bytes": 0},
            {"shard": 1, "slots": 2048, "jobs": 7, "bytes": 500_000},
        ],
        "after": [{"shard": 0, "slots": 4096, "jobs": 7, "bytes": 500_000}],
        "warning": None,
    }


def test_a_plan_with_nothing_to_do_says_so(behind: Behind, shell: Shell) -> None:
    assert shell.lines("plan")[0] == "nothing moves: 2 shards, as even as can be"
    assert shell.lines("apply") == ["nothing moves: 2 shards, as even as can be"]


def test_what_is_to_be_even_can_be_chosen(behind: Behind, shell: Shell) -> None:
    behind.loads = {0: (10, 1), 2: (10, 1), 4: (1, 100), 6: (1, 100)}
    assert [share["jobs"] for share in shell.plain("plan", "--by", "jobs")["after"]] == [11, 11]
    assert shell.plain("plan", "--by", "bytes")["after"][1]["bytes"] in (100, 101, 102)
    assert shell.plain("plan")["slots"] == 0


def test_apply_tells_each_batch_and_the_whole(behind: Behind, shell: Shell) -> None:
    behind.loads = {1: (7, 500_000)}
    outcome = shell.run("apply", "--shards", "1", "--rate-limit", "2.5")
    assert outcome.status == 0
    lines = outcome.err.splitlines()
    assert (len(lines), lines[0]) == (33, "from shard 1 to 0: 64 slots, 7 jobs, 0.5 MB, held for 64 ms")
    assert lines[-1] == "1 shard now"
    assert outcome.out.startswith("2048 slots moved, with 7 jobs, 0.5 MB in ")
    assert outcome.out.endswith("; operations were held for 64 ms at most; 1 shard, epoch 34\n")
    assert {move.rate_limit_bytes_per_second for move in behind.moves} == {2_500_000}


def test_apply_in_json_has_every_batch(behind: Behind, shell: Shell) -> None:
    behind.loads = {1: (7, 500_000)}
    found = shell.plain("apply", "--shards", "1")
    batches = found.pop("batches")
    assert batches[0] == {
        "from": 1,
        "to": 0,
        "slots": list(range(1, 128, 2)),
        "jobs": 7,
        "bytes": 500_000,
        "records": 9,
        "hold_ms": 64,
    }
    assert found.pop("seconds") > 0
    assert found == {
        "complete": True,
        "epoch": 34,
        "shards": 1,
        "slots": 2048,
        "jobs": 7,
        "records": 288,
        "bytes": 500_000,
        "hold_ms": 64,
        "warning": None,
    }


def test_a_refusal_is_told_with_its_reason_and_tried_again(behind: Behind, shell: Shell) -> None:
    behind.refusals = [Refusal(grpc.StatusCode.UNAVAILABLE, "shard 1 was started again during the move")]
    outcome = shell.run("move", "--slot", "1", "--to", "0")
    assert outcome.status == 0
    assert outcome.err.splitlines()[0] == (
        "moving 1 slot from shard 1 to 0: shard 1 was started again during the move; again in 0.2 s"
    )
    assert len(behind.moves) == 2


def test_what_is_refused_for_good_is_one_line_and_status_1(behind: Behind, shell: Shell) -> None:
    behind.refusals = [Refusal(grpc.StatusCode.FAILED_PRECONDITION, "the slots are elsewhere")]
    assert shell.fails("move", "--slot", "1", "--to", "0") == "the slots are elsewhere"


@pytest.mark.parametrize("command", [["apply", "--shards", "1"], ["move", "--slot", "1", "--to", "new"]])
def test_a_dry_run_shows_the_plan_and_changes_nothing(behind: Behind, shell: Shell, command: list[str]) -> None:
    shown = shell.lines(*command, "--dry-run")
    assert shown[1].split() == ["shard", "slots", "then", "jobs", "then", "MB", "then"]
    assert "batches" in shell.plain(*command, "--dry-run")
    assert (behind.moves, behind.map) == ([], SlotMap.even(2))
    assert not (shell.directory / LOCK_FILE).exists()


# -- move -------------------------------------------------------------------------------------------


def test_a_queue_moves_with_its_slot_and_those_who_share_it_are_named(behind: Behind, shell: Shell) -> None:
    behind.queues = [
        pb.Queue(name="mail", slot=MAIL),
        pb.Queue(name="other", slot=(MAIL + 1) % 4096),
        pb.Queue(name="twin\n", slot=MAIL),
    ]
    to = 1 - behind.map.owners[MAIL]
    outcome = shell.run("move", "--queue", "mail", "--to", str(to))
    assert outcome.status == 0
    assert outcome.err.splitlines()[0] == f"queue mail is in slot {MAIL}; with it move twin"
    assert behind.map.owners[MAIL] == to
    assert [list(move.slots) for move in behind.moves] == [[MAIL]]


def test_a_queue_of_which_nothing_is_stored_moves_as_well(behind: Behind, shell: Shell) -> None:
    outcome = shell.run("move", "--queue", "mail", "--to", str(1 - behind.map.owners[MAIL]))
    assert (outcome.status, outcome.err.splitlines()[0]) == (0, f"queue mail is in slot {MAIL}")


def test_a_queue_gets_a_shard_of_its_own(behind: Behind, shell: Shell) -> None:
    outcome = shell.run("move", "--queue", "mail", "--to", "new")
    assert (outcome.status, outcome.err.splitlines()[1]) == (0, "3 shards now")
    assert behind.map.slots_of(2) == [MAIL]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan", "--shards", "0"], "there can be 1 to 64 shards, not 0"),
        (["apply", "--shards", "65"], "there can be 1 to 64 shards, not 65"),
        (["apply", "--rate-limit", "0"], "--rate-limit is 0; allowed: megabytes per second, more than 0"),
        (["apply", "--rate-limit", "nan"], "--rate-limit is nan; allowed: megabytes per second, more than 0"),
        (["move", "--to", "1"], "give --slot or --queue"),
        (["move", "--to", "1", "--slot", "1", "--queue", "q"], "give --slot or --queue"),
        (["move", "--to", "one", "--slot", "1"], "--to takes the number of a shard or `new`, not 'one'"),
        (["move", "--to", "2", "--slot", "1"], "shards are 0 to 1, not 2; `--to new` adds one"),
        (["move", "--to", "1", "--slot", "1"], "slot 1 is on shard 1 already"),
        (["move", "--to", "1", "--slot", "4096"], "slots are 0 to 4095, not 4096"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_changes_nothing(
    behind: Behind, shell: Shell, arguments: list[str], text: str
) -> None:
    assert shell.fails(*arguments) == text
    assert (behind.moves, behind.map) == ([], SlotMap.even(2))


# -- status and verify ------------------------------------------------------------------------------


def test_the_status_shows_what_the_shards_own_and_how_even_that_is(behind: Behind, shell: Shell) -> None:
    behind.loads = {0: (30, 2_000_000), 1: (10, 1_000_000)}
    assert shell.lines("status") == [
        "2 shards, epoch 1, nothing is being moved",
        "shard  slots  jobs  MB ",
        "0      2048   30    2.0",
        "1      2048   10    1.0",
        "the fullest shard against the mean: slots 1.00, jobs 1.50, bytes 1.33",
    ]
    assert shell.plain("status") == {
        "epoch": 1,
        "shards": [
            {"shard": 0, "slots": 2048, "jobs": 30, "bytes": 2_000_000},
            {"shard": 1, "slots": 2048, "jobs": 10, "bytes": 1_000_000},
        ],
        "fullest_to_mean": {"slots": 1.0, "jobs": 1.5, "bytes": 1.3333},
        "moving_process": None,
        "loads_unknown": None,
        "warning": None,
    }


def test_the_status_names_the_process_that_moves_slots(behind: Behind, shell: Shell) -> None:
    with rebalance_lock(shell.directory):
        assert shell.lines("status")[0] == f"2 shards, epoch 1, process {os.getpid()} is at it"
        assert shell.plain("status")["moving_process"] == os.getpid()


def test_the_status_without_a_shard_shows_who_owns_what(behind: Behind, shell: Shell) -> None:
    behind.no_loads = True
    outcome = shell.run("status")
    assert outcome.out.splitlines()[1:] == ["shard  slots", "0      2048 ", "1      2048 "]
    assert outcome.err == "jobs and bytes are not known: shard 1 is down\n"


def test_a_configured_number_that_the_next_start_refuses_is_told(behind: Behind, shell: Shell) -> None:
    shell.configure(SEPP_SERVER__SHARDS="2")
    assert shell.run("status").err == ""
    text = "server.shards is 2: the next start is refused with {}; set server.shards to {} or leave it out"
    assert shell.plain("plan", "--shards", "1")["warning"] == text.format("1 shard", 1)
    done = shell.run("apply", "--shards", "3")
    assert done.err.splitlines()[-1] == "warning: " + text.format("3 shards", 3)
    assert shell.run("status").err == "warning: " + text.format("3 shards", 3) + "\n"


def test_verify_goes_through_all_shards_step_by_step(behind: Behind, shell: Shell) -> None:
    behind.steps = {
        0: [pb.VerifyShardResponse(records=5, cursor=b"1"), pb.VerifyShardResponse(records=6)],
        1: [pb.VerifyShardResponse(records=7)],
    }
    assert shell.lines("verify") == ["2 shards, 18 records: all is where it belongs and adds up"]
    assert behind.calls.count("VerifyShard") == 3


def test_verify_prints_what_it_finds_and_ends_with_status_1(behind: Behind, shell: Shell) -> None:
    behind.steps = {
        0: [pb.VerifyShardResponse(records=5)],
        1: [pb.VerifyShardResponse(records=7, findings=["queue q counts 3 ready jobs and has 2"])],
    }
    outcome = shell.run("verify")
    assert outcome == Outcome(
        1, "shard 1: queue q counts 3 ready jobs and has 2\n2 shards, 12 records: 1 finding\n", ""
    )
    outcome = shell.run("verify", "--json")
    assert (outcome.status, json.loads(outcome.out)["findings"]) == (1, 1)


# -- one at a time, and where no server answers -----------------------------------------------------


@pytest.mark.parametrize("command", [["apply", "--shards", "1"], ["move", "--slot", "1", "--to", "0"], ["verify"]])
def test_a_second_one_is_refused_while_the_first_is_at_it(behind: Behind, shell: Shell, command: list[str]) -> None:
    with rebalance_lock(shell.directory):
        assert shell.fails(*command) == (
            f"process {os.getpid()} is moving or verifying slots of {shell.directory} already; wait for it"
        )
    assert behind.calls == []


def test_a_plan_can_be_made_meanwhile(behind: Behind, shell: Shell) -> None:
    with rebalance_lock(shell.directory):
        assert shell.lines("plan", "--shards", "2")[0] == "nothing moves: 2 shards, as even as can be"


def test_a_directory_that_is_in_use_without_a_socket_is_refused(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_module, "ANSWER_S", 0.0)
    SlotMap.even(2).save(shell.directory)
    with DataDirectory.open(shell.directory, os.environ):
        for command in (["plan"], ["apply", "--shards", "1"], ["status"], ["verify"]):
            text = shell.fails(*command)
            assert text.startswith(
                f"{shell.directory} is in use by process {os.getpid()}, which does not answer on admin.sock: "
            )
    assert SlotMap.load(shell.directory) == SlotMap.even(2)


@pytest.mark.parametrize("command", [["plan"], ["apply", "--shards", "2"], ["status"], ["verify"]])
def test_a_directory_without_data_is_refused_and_stays_empty(shell: Shell, command: list[str]) -> None:
    text = shell.fails(*command)
    assert text.startswith(f"{shell.directory / SLOT_MAP_FILE}: No such file or directory: no server has been started")
    assert list(shell.directory.iterdir()) == []


def test_a_directory_of_another_user_is_not_written_to(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    SlotMap.even(2).save(shell.directory)
    monkeypatch.setattr(os, "geteuid", lambda: shell.directory.stat().st_uid + 1)
    outcome = shell.run("plan")
    assert outcome.status == 1
    assert outcome.err.splitlines()[-1] == (
        f"seppd: {shell.directory} belongs to another user: run this as the user that runs the server"
    )


# -- Ctrl-C -----------------------------------------------------------------------------------------


def test_ctrl_c_ends_it_after_the_current_slots_and_the_same_command_goes_on(
    behind: Behind, shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt_at_the_second() -> None:
        if len(behind.moves) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    behind.on_move = interrupt_at_the_second
    outcome = shell.run("apply", "--shards", "1", "--json")
    found = json.loads(outcome.out)
    assert (outcome.status, found["complete"], found["slots"], found["shards"]) == (130, False, 128, 2)
    assert capfd.readouterr().err.strip() == (
        "stopping after the current slots; run the same command again to go on, Ctrl-C again to end at once"
    )
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert shell.plain("apply", "--shards", "1")["slots"] == 2048 - 128


def test_a_second_ctrl_c_ends_it_at_once(behind: Behind, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    told, over = threading.Event(), threading.Event()
    write = os.write

    def writing(descriptor: int, data: bytes) -> int:
        told.set()
        return write(descriptor, data)

    def interrupt_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        told.wait(WAIT_S)
        os.kill(os.getpid(), signal.SIGINT)
        over.wait(WAIT_S)

    monkeypatch.setattr(rebalance_cli.os, "write", writing)
    behind.on_move = interrupt_twice
    outcome = shell.run("apply", "--shards", "1")
    over.set()
    assert (outcome.status, outcome.out) == (130, "")


# -- numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "1 s"), (89.4, "89 s"), (90.0, "2 min"), (5_300.0, "88 min"), (7_500.0, "2 h 5 min")]
)
def test_a_duration_is_told_in_the_units_that_matter(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_speed_has_jobs_and_megabytes() -> None:
    assert speed(30, 5_000_000, 2.0) == "2.5 MB/s, 15 jobs/s"


def test_evenness_of_nothing_is_unknown() -> None:
    assert evenness([Share(0, 4096, 0, 0)]) == {"slots": 1.0, "jobs": None, "bytes": None}
