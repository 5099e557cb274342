"""The generated messages: up to date, and the same descriptor as the official client's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("queue_pb2.py", "queue_pb2.pyi", "admin_pb2.py", "admin_pb2.pyi")

CLIENT_MODULE = "sepp.v1.queue_pb2"
SERVER_MODULE = "common.queue_pb2"


def run_python(*arguments: str) -> str:
    """Output of a fresh interpreter: descriptors are registered once per process and stay."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    run_python("scripts/generate.py", str(folder))
    return folder


@pytest.mark.parametrize("name", GENERATED)
def test_the_generated_code_is_what_the_generator_writes_now(fresh: Path, name: str) -> None:
    assert (ROOT / "common" / name).read_text() == (fresh / name).read_text()


def test_the_descriptor_is_byte_for_byte_the_clients() -> None:
    show = "import {module} as m; print(m.DESCRIPTOR.name, m.DESCRIPTOR.serialized_pb.hex())"

    ours = run_python("-c", show.format(module=SERVER_MODULE))

    assert ours == run_python("-c", show.format(module=CLIENT_MODULE))
    assert ours.startswith("sepp/v1/queue.proto ")


@pytest.mark.parametrize(
    ("first", "second"), [(SERVER_MODULE, CLIENT_MODULE), (CLIENT_MODULE, SERVER_MODULE)], ids=["ours", "theirs"]
)
def test_both_load_in_one_process_whichever_comes_first(first: str, second: str) -> None:
    script = (
        f"import {first} as a, {second} as b\n"
        "job = a.Job(id='x', attempt=2)\n"
        "print(b.Job.FromString(job.SerializeToString()) == job)\n"
    )

    assert run_python("-c", script) == "True\n"


def test_every_field_carries_its_json_name() -> None:
    from common import queue_pb2

    file = descriptor_pb2.FileDescriptorProto.FromString(queue_pb2.DESCRIPTOR.serialized_pb)

    every = [f"{message.name}.{field.name}" for message in file.message_type for field in message.field]
    named = [
        f"{message.name}.{field.name}"
        for message in file.message_type
        for field in message.field
        if field.HasField("json_name")
    ]
    assert named == every


def test_no_stamp_ties_the_generated_code_to_a_protobuf_version() -> None:
    assert "runtime_version" not in (ROOT / "common" / "queue_pb2.py").read_text()
