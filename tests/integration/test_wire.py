"""What a whole server says to calls that no well-behaved client makes, and beside the queue service; on both fronts."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from sepp.errors import UnauthenticatedError

from tests.integration.clients import METHODS, SERVICE, channel_to, connected, job, park, reserve, reserve_one, settled
from tests.integration.conftest import StartServer
from tests.integration.server import WAIT_S, Server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNTOUCHED = b""  # an empty message, which is one of every method


async def status_of(channel: grpc.aio.Channel, path: str, request: bytes) -> grpc.StatusCode:
    try:
        await channel.unary_unary(path)(request, timeout=WAIT_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
    status: int = answer.status
    return status


async def test_a_job_goes_through_either_front(server_of_front: Server) -> None:
    queue = server_of_front.queue_on(0)
    async with connected(server_of_front.address) as client:
        poll = await park(client, queue)
        ack = await client.enqueue(job(queue, "text"))
        (found,) = await settled(poll)
        assert (found.ctx.id, found.ctx.attempt) == (ack.job_id, 1)
        await client.ack(found.ctx)
        assert await reserve(client, queue) == []


async def test_a_cancelled_poll_takes_no_job_on_either_front(server_of_front: Server) -> None:
    queue = server_of_front.queue_on(0)
    async with connected(server_of_front.address) as client:
        poll = await park(client, queue)
        poll.cancel()
        ack = await client.enqueue(job(queue))
        found = await reserve_one(client, queue)
        assert (found.ctx.id, found.ctx.attempt) == (ack.job_id, 1)


async def test_a_message_over_the_limit_is_refused_and_the_connection_goes_on(server_of_front: Server) -> None:
    async with channel_to(server_of_front.address) as channel:
        too_large = bytes(16_777_217)
        assert await status_of(channel, f"/{SERVICE}/EnqueueBatch", too_large) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await status_of(channel, f"/{SERVICE}/GetServerInfo", UNTOUCHED) == grpc.StatusCode.OK


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_no_message_are_an_internal_error(server_of_front: Server, method: str) -> None:
    async with channel_to(server_of_front.address) as channel:
        cut_short = b"\x0a\x05a"  # field 1 is said to have five bytes and has one
        assert await status_of(channel, f"/{SERVICE}/{method}", cut_short) == grpc.StatusCode.INTERNAL
        assert await status_of(channel, f"/{SERVICE}/GetServerInfo", UNTOUCHED) == grpc.StatusCode.OK


@pytest.mark.parametrize("path", [f"/{SERVICE}/Peek", "/sepp.v2.QueueService/Reserve"])
async def test_an_unknown_method_is_unimplemented(server_of_front: Server, path: str) -> None:
    async with channel_to(server_of_front.address) as channel:
        assert await status_of(channel, path, UNTOUCHED) == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_health_is_serving_once_the_server_listens(server_of_front: Server, service: str) -> None:
    async with channel_to(server_of_front.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
        while (await watch.read()).status != SERVING:  # the router hears of it at the same time as the log does
            pass
        assert await health_of(channel, service) == SERVING
        watch.cancel()


async def test_reflection_lists_the_services(server_of_front: Server) -> None:
    async with channel_to(server_of_front.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(timeout=WAIT_S)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
        names = {service.name for service in answer.list_services_response.service}
        assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_reflection_describes_every_method(server_of_front: Server) -> None:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    async with channel_to(server_of_front.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(timeout=WAIT_S)
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
        answer = await call.read()
        await call.done_writing()
        files = [FileDescriptorProto.FromString(one) for one in answer.file_descriptor_response.file_descriptor_proto]
        (file,) = [one for one in files if one.name == "sepp/v1/queue.proto"]
        assert [method.name for method in file.service[0].method] == list(METHODS)


@pytest.mark.parametrize("front", ["queue", "aio"])
async def test_health_is_not_serving_while_a_running_call_holds_up_the_end(new_server: StartServer, front: str) -> None:
    server = new_server(front=front).start()
    queue = server.queue_on(0)
    async with channel_to(server.address) as channel, connected(server.address) as client:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        while (await watch.read()).status != SERVING:
            pass
        server.pause("shard-0")
        held_up = asyncio.create_task(client.enqueue(job(queue)))
        await client.get_server_info()  # behind the enqueue on the same connection
        server.terminate()
        changed = await asyncio.wait_for(watch.read(), WAIT_S)
        assert changed.status == NOT_SERVING
        assert not held_up.done()
        server.resume("shard-0")
        ack = await asyncio.wait_for(held_up, WAIT_S)
    assert await asyncio.to_thread(server.exit_status) == 0
    server.restart()
    async with connected(server.address) as client:
        assert (await reserve_one(client, queue)).ctx.id == ack.job_id


async def test_only_a_listed_api_key_is_let_in(new_server: StartServer) -> None:
    server = new_server(settings={"SEPP_AUTH__API_KEYS": '["secret-1", "secret-2"]'}).start()
    async with connected(server.address) as client:
        with pytest.raises(UnauthenticatedError):
            await client.get_server_info()
    async with channel_to(server.address) as channel:
        info = channel.unary_unary(f"/{SERVICE}/GetServerInfo")
        for shown in ("Bearer secret-3", "bearer secret-1", "secret-1"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await info(UNTOUCHED, metadata=(("authorization", shown),), timeout=WAIT_S)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert await info(UNTOUCHED, metadata=(("authorization", "Bearer secret-2"),), timeout=WAIT_S)
        assert await health_of(channel, SERVICE) in (SERVING, NOT_SERVING)  # answered without a key
