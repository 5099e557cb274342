"""GetServerInfo, API keys, health and reflection."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common import __version__
from common import queue_pb2 as pb
from tests.conformance.service import CALL_TIMEOUT_S, SERVICE, Refused, Service, now_ms
from tests.integration.server import Server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


# ---- GetServerInfo


def info(service: Service) -> pb.GetServerInfoResponse:
    """Without the clock, which is checked here."""
    before_ms = now_ms()
    found = service.info()
    assert before_ms <= found.server_time.ToMilliseconds() <= now_ms()
    found.ClearField("server_time")
    return found


def test_the_info_of_a_server_with_nothing_configured_is_that_of_the_defaults(plain: Service) -> None:
    assert info(plain) == pb.GetServerInfoResponse(
        server_version=__version__,
        supported_protocol_versions=["v1"],
        max_payload_bytes=1_048_576,
        max_custom_entries=64,
        max_custom_total_bytes=16_384,
        max_custom_key_bytes=256,
        max_queue_name_bytes=512,
        max_job_type_bytes=256,
        max_idempotency_key_bytes=256,
        max_schedule_horizon=Duration(seconds=2_592_000),
        max_enqueue_batch=256,
        max_reserve_batch=256,
        max_reserve_queues=32,
        max_wait_timeout=Duration(seconds=300),
        max_lease_duration=Duration(seconds=300),
    )


def test_the_info_gives_the_global_limits_and_not_those_of_queues(limited: Service) -> None:
    assert info(limited) == pb.GetServerInfoResponse(
        server_version=__version__,
        supported_protocol_versions=["v1"],
        max_payload_bytes=64,
        max_custom_entries=3,
        max_custom_total_bytes=40,
        max_custom_key_bytes=8,
        max_queue_name_bytes=24,
        max_job_type_bytes=12,
        max_idempotency_key_bytes=10,
        max_schedule_horizon=Duration(seconds=3_600),
        max_enqueue_batch=6,
        max_reserve_batch=4,
        max_reserve_queues=3,
        max_wait_timeout=Duration(nanos=300_000_000),
        max_lease_duration=Duration(seconds=60),
        dead_letter_retention_enabled=True,
    )


def test_the_info_tells_strict_mode_and_the_encodings(strict: Service) -> None:
    found = info(strict)
    assert (found.strict_queues, found.restricts_encodings) == (True, True)
    assert found.allowed_encodings == ["json", "cbor"]


def test_an_empty_list_of_encodings_is_a_restriction(keyed: Service) -> None:
    found = keyed.info([("authorization", "Bearer key-one")])
    assert (found.restricts_encodings, list(found.allowed_encodings)) == (True, [])


# ---- API keys


@pytest.mark.parametrize("key", ["key-one", "key-two"])
def test_each_listed_key_is_taken(keyed: Service, key: str) -> None:
    assert keyed.info([("authorization", f"Bearer {key}")]).supported_protocol_versions == ["v1"]


@pytest.mark.parametrize(
    "value",
    [
        "Bearer key-three",
        "Bearer key-on",
        "Bearer key-one1",
        "Bearer KEY-ONE",
        "Bearer first",
        "Bearer ",
        "Bearer",
        "bearer key-one",
        "BEARER key-one",
        "Bearer  key-one",
        "Basic key-one",
        "key-one",
        "",
    ],
)
def test_what_is_no_listed_key_after_bearer_and_one_blank_is_refused(keyed: Service, value: str) -> None:
    with pytest.raises(Refused) as refused:
        keyed.info([("authorization", value)])
    assert refused.value.code == "UNAUTHENTICATED"


def test_a_key_in_other_metadata_is_refused(keyed: Service) -> None:
    with pytest.raises(Refused) as refused:
        keyed.info([("x-api-key", "key-one")])
    assert refused.value.code == "UNAUTHENTICATED"


def test_a_request_that_is_no_message_is_refused_for_its_missing_key_first(keyed: Service) -> None:
    assert keyed.code("Reserve", b"\xff") == "UNAUTHENTICATED"


def test_without_keys_configured_a_key_is_not_looked_at(plain: Service) -> None:
    assert plain.info([("authorization", "Bearer whatever")]).server_version == __version__


@pytest.mark.parametrize("metadata", [[], [("authorization", "Bearer key-one")], [("authorization", "Bearer ")]])
def test_an_empty_list_of_keys_refuses_everybody(locked: Service, metadata: list[tuple[str, str]]) -> None:
    assert locked.code("GetServerInfo", b"", metadata) == "UNAUTHENTICATED"


# ---- health


def health(service: Service, name: str) -> int:
    stub = health_pb2_grpc.HealthStub(service.channel)
    status: int = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=CALL_TIMEOUT_S).status
    return status


def wait_until_healthy(service: Service, name: str) -> grpc.Future:
    """A watch that has seen the service healthy, which may be a moment after the server listens."""
    stub = health_pb2_grpc.HealthStub(service.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=CALL_TIMEOUT_S)
    while next(watch).status != SERVING:
        pass
    return watch


@pytest.mark.parametrize("name", ["", SERVICE])
def test_a_running_server_is_healthy(plain: Service, name: str) -> None:
    wait_until_healthy(plain, name).cancel()
    assert health(plain, name) == SERVING


@pytest.mark.parametrize("name", ["", SERVICE])
def test_health_needs_no_key(locked: Service, name: str) -> None:
    wait_until_healthy(locked, name).cancel()
    assert health(locked, name) == SERVING


def test_the_health_of_a_service_that_is_not_here_is_not_found(plain: Service) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        health(plain, "sepp.v1.OtherService")
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("front", ["queue", "aio"])
def test_health_says_that_a_server_stops_before_it_is_gone(front: str) -> None:
    with Server(front=front) as server:
        service = Service(server.start().address)
        watch = wait_until_healthy(service, SERVICE)
        server.terminate()
        assert next(watch).status == NOT_SERVING
        assert server.exit_status() == 0
        service.close()


# ---- reflection


def test_reflection_is_on_the_same_port(plain: Service) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(plain.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=CALL_TIMEOUT_S)
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


def test_reflection_gives_the_file_of_the_schema(plain: Service) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(plain.channel)
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=CALL_TIMEOUT_S)
    assert pb.DESCRIPTOR.serialized_pb in answer.file_descriptor_response.file_descriptor_proto
