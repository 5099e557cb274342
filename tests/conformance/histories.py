"""Plays a recorded history against a server: requests go out as recorded, answers must be as recorded.

`golden.json` is a list of groups `{config, cases}`; a case is `{name, steps}`; a step is a call, a
sleep, or a restart of the server. Requests and answers are protobuf JSON with placeholders:
`$repeat:TEXT:N`, `$bytes:N`, `$now±MS`, `$id:jN` in requests; `$id:jN` (bound at its first
appearance), `$text`, `$now±MS` (within two seconds) and `$epoch` in answers.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format

from common import queue_pb2

HISTORIES = Path(__file__).parent / "golden.json"
REQUESTS = {
    "EnqueueBatch": (queue_pb2.EnqueueBatchRequest, queue_pb2.EnqueueBatchResponse),
    "EnqueueAtomic": (queue_pb2.EnqueueBatchRequest, queue_pb2.EnqueueAtomicResponse),
    "Reserve": (queue_pb2.ReserveRequest, queue_pb2.ReserveResponse),
    "Ack": (queue_pb2.AckRequest, queue_pb2.AckResponse),
    "Nack": (queue_pb2.NackRequest, queue_pb2.NackResponse),
    "Extend": (queue_pb2.ExtendRequest, queue_pb2.ExtendResponse),
    "DrainDeadLetters": (queue_pb2.DrainDeadLettersRequest, queue_pb2.DrainDeadLettersResponse),
    "GetServerInfo": (queue_pb2.GetServerInfoRequest, queue_pb2.GetServerInfoResponse),
}
# How far an instant in an answer may be from the recorded one, in ms.
TOLERANCE_MS = 2_000
CALL_TIMEOUT_S = 60.0

Step = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One history: its name is unique within the file."""

    group: int
    name: str
    steps: list[Step]


def groups() -> list[tuple[str, list[Case]]]:
    """The configuration (TOML) of each group, and its cases."""
    recorded = json.loads(HISTORIES.read_text())
    return [
        (group["config"], [Case(number, case["name"], unhurried(case)) for case in group["cases"]])
        for number, group in enumerate(recorded)
    ]


def unhurried(case: dict[str, Any]) -> list[Step]:
    """The steps of a case, with more time where a call has to come before a short lease has run out.

    There is one such case. Its 0.6 s are less than a loaded machine takes at times between two calls.
    """
    steps: list[Step] = case["steps"]
    if case["name"] == "extend: survives the first expiry":
        _, reserve, _, pause, *_ = steps
        reserve["request"]["lease_duration"] = "3s"
        reserve["response"]["jobs"][0]["lease_expires_at"] = "$now+3000"
        pause["sleep_ms"] = 3_600
    return steps


@dataclass
class Player:
    """Plays the steps of one case. `restart` ends the server ("kill" or "term"), starts it again and
    returns a channel to it."""

    channel: grpc.Channel
    restart: Callable[[str], grpc.Channel]
    ids: dict[str, str] = field(default_factory=dict)  # placeholder: job id
    instants: set[str] = field(default_factory=set)  # what was sent, in RFC 3339
    calls_ms: list[int] = field(default_factory=list)  # when each call was made, wall time

    def play(self, case: Case) -> None:
        for number, step in enumerate(case.steps):
            if "sleep_ms" in step:
                time.sleep(step["sleep_ms"] / 1000)
            elif "restart" in step:
                self.channel = self.restart(step["restart"])
            else:
                self._call(f"{case.name}, step {number}", step)

    def _call(self, where: str, step: Step) -> None:
        request_type, response_type = REQUESTS[step["call"]]
        self.calls_ms.append(_now_ms())
        if "raw_hex" in step:
            request = bytes.fromhex(step["raw_hex"])
        else:
            message = json_format.ParseDict(self._sent(step.get("request", {})), request_type())
            request = message.SerializeToString()
        call = self.channel.unary_unary(f"/sepp.v1.QueueService/{step['call']}")
        metadata = [(key, value) for key, value in step.get("metadata", [])]
        try:
            answer = call(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
            code, text = "OK", ""
        except grpc.RpcError as error:
            answer, code, text = b"", error.code().name, error.details()
        expected = step["code"] if isinstance(step["code"], list) else [step["code"]]
        assert code in expected, f"{where}: {code} ({text}), recorded {expected}"
        if code == "OK":
            got = json_format.MessageToDict(response_type.FromString(answer), preserving_proto_field_name=True)
            self._compare(where, got, step.get("response", {}))
        else:
            assert text, f"{where}: {code} without a text"

    # -- requests -----------------------------------------------------------------------------

    def _sent(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._sent(key): self._sent(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._sent(item) for item in value]
        if not isinstance(value, str) or not value.startswith("$"):
            return value
        if value.startswith("$repeat:"):
            _, text, count = value.split(":")
            return text * int(count)
        if value.startswith("$bytes:"):
            return base64.b64encode(b"x" * int(value[7:])).decode()
        if value.startswith("$now"):
            instant = queue_pb2.Job().enqueued_at
            instant.FromMilliseconds(_now_ms() + int(value[4:] or 0))
            self.instants.add(instant.ToJsonString())
            return instant.ToJsonString()
        if value.startswith("$id:"):
            return self.ids[value]
        raise AssertionError(f"a placeholder that nobody knows: {value}")

    # -- answers ------------------------------------------------------------------------------

    def _compare(self, where: str, got: Any, recorded: Any) -> None:
        if isinstance(recorded, dict):
            assert isinstance(got, dict), f"{where}: {got!r}, recorded {recorded!r}"
            # The end of a dead letter's lease means nothing.
            ignored = {"lease_expires_at"} if "lease_expires_at" not in recorded else set()
            names = got.keys() - ignored
            assert names == recorded.keys(), f"{where}: fields {sorted(names)}, recorded {sorted(recorded)}"
            for name, value in recorded.items():
                self._compare(f"{where}, {name}", got[name], value)
        elif isinstance(recorded, list):
            assert isinstance(got, list) and len(got) == len(recorded), f"{where}: {got!r}, recorded {recorded!r}"
            for index, value in enumerate(recorded):
                self._compare(f"{where}[{index}]", got[index], value)
        elif isinstance(recorded, str) and recorded.startswith("$"):
            self._compare_placeholder(where, got, recorded)
        else:
            assert got == recorded, f"{where}: {got!r}, recorded {recorded!r}"

    def _compare_placeholder(self, where: str, got: Any, recorded: str) -> None:
        if recorded.startswith("$id:"):
            known = self.ids.setdefault(recorded, got)
            assert got == known, f"{where}: {got!r} is not {recorded} ({known})"
            others = [name for name, job_id in self.ids.items() if job_id == got and name != recorded]
            assert not others, f"{where}: {recorded} has the id of {others}"
        elif recorded == "$text":
            assert isinstance(got, str) and got, f"{where}: {got!r} is no text"
        elif recorded == "$epoch":
            assert _milliseconds(got) == 0, f"{where}: {got!r} is not the epoch"
        elif recorded.startswith("$now"):
            # An instant of an earlier call (`enqueued_at`) counts from that call, however long ago.
            offset = _milliseconds(got) - int(recorded[4:] or 0)
            difference = min(abs(offset - made_ms) for made_ms in (*self.calls_ms, _now_ms()))
            assert got in self.instants or difference <= TOLERANCE_MS, f"{where}: {got!r} is {difference} ms off"
        else:
            raise AssertionError(f"a placeholder that nobody knows: {recorded}")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _milliseconds(instant: str) -> int:
    whole = datetime.fromisoformat(instant.replace("Z", "+00:00"))
    return round(whole.timestamp() * 1000)
