"""Who may call, and over what: API keys and their rotation, TLS, and what a start says of files it cannot use."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from sepp import ConnectError, SeppClient, UnauthenticatedError

from common import queue_pb2 as pb
from common.config import ConfigError, ServerSection
from common.config_tls import read_tls
from router.front import Status
from tests.integration.clients import (
    CHANNEL_OPTIONS,
    METHODS,
    NO_WAIT,
    SERVICE,
    job,
    reserve_one,
    texts,
)
from tests.integration.conftest import StartServer
from tests.integration.server import WAIT_S, Entry, Server
from tests.integration.test_command_line import Shell
from tests.unit.router_driver import RouterDriver, configured

TLS = Path(__file__).parent / "tls"
CERTIFICATE = (TLS / "server.crt").read_bytes()
# What the certificate is for; servers are called by their address.
HOST = "localhost"
WITH_TLS = {"SEPP_SERVER__TLS_CERT_PATH": "server.crt", "SEPP_SERVER__TLS_KEY_PATH": "server.key"}
TWO_KEYS = '[auth]\napi_keys = [{ name = "one", key = "first-key" }, { name = "two", key = "second-key" }]\n'
ALL_REFUSED = "[auth]\napi_keys = []\n"

Metadata = list[tuple[str, str]]
Dial = Callable[..., grpc.Channel]


def bearer(key: str) -> Metadata:
    return [("authorization", f"Bearer {key}")]


def code(channel: grpc.Channel, metadata: Metadata, method: str = "GetServerInfo", request: bytes = b"") -> str:
    """The name of the status of a call."""
    try:
        channel.unary_unary(f"/{SERVICE}/{method}")(request, timeout=WAIT_S, metadata=metadata)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


@contextmanager
def dialled(address: str, credentials: grpc.ChannelCredentials | None = None) -> Iterator[grpc.Channel]:
    """A channel with a connection of its own; with credentials, over TLS."""
    if credentials is None:
        channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
    else:
        options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", HOST))
        channel = grpc.secure_channel(address, credentials, options)
    with channel:
        yield channel


def trusting(certificate: bytes = CERTIFICATE) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(root_certificates=certificate)


@pytest.fixture(scope="module", params=["queue", "aio"])
def keyed(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of each front with two keys."""
    with Server(front=request.param, toml=TWO_KEYS) as server:
        yield server.start()


@pytest.fixture
def channel(keyed: Server) -> Iterator[grpc.Channel]:
    with dialled(keyed.address) as channel:
        yield channel


# -- keys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metadata",
    [
        bearer("first-key"),
        bearer("second-key"),
        [("other", "x"), *bearer("first-key")],
        [*bearer("first-key"), *bearer("wrong")],  # the first one counts
    ],
    ids=str,
)
def test_a_call_with_a_listed_key_is_served(channel: grpc.Channel, metadata: Metadata) -> None:
    assert code(channel, metadata) == "OK"


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        bearer(""),
        bearer("first-ke"),
        bearer("first-keyy"),
        bearer("First-key"),
        bearer("first-key "),
        bearer(" first-key"),
        bearer("one"),
        bearer("first-key second-key"),
        bearer("first-key,second-key"),
        bearer("x" * 4_000),
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "Bearerfirst-key")],
        [("authorization", "Bearer:first-key")],
        [("authorization", " Bearer first-key")],
        [("authorization", "bearer first-key")],
        [("authorization", "BEARER first-key")],
        [("authorization", "first-key")],
        [("authorization", "Basic first-key")],
        [("x-api-key", "first-key")],
        [*bearer("wrong"), *bearer("first-key")],
    ],
    ids=lambda metadata: str(metadata)[:60],
)
def test_a_call_without_a_listed_key_is_unauthenticated(channel: grpc.Channel, metadata: Metadata) -> None:
    assert code(channel, metadata) == "UNAUTHENTICATED"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("request_bytes", [b"", b"\xff"], ids=["empty", "no message"])
def test_without_a_key_no_request_is_looked_at(channel: grpc.Channel, method: str, request_bytes: bytes) -> None:
    assert code(channel, [], method, request_bytes) == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    "value", [b"Bearer \xff\xfe", b"Bearer first-key\xc3\xbc", b"\xc3\xbc first-key", b"Bearer \xed\xb2\x80"], ids=repr
)
def test_a_key_of_other_bytes_than_ascii_is_unauthenticated(keyed: Server, value: bytes) -> None:
    """Such metadata no gRPC client sends, so it is written by hand."""
    count = len(keyed.log.entries)
    assert b"grpc-status\x0216" in call_by_hand(keyed.address, value)
    assert b"grpc-status\x010" in call_by_hand(keyed.address, b"Bearer first-key")
    with dialled(keyed.address) as channel:
        assert code(channel, bearer("first-key")) == "OK"
    assert keyed.log.entries[count:] == []


def test_a_key_that_is_no_text_at_all_is_unauthenticated() -> None:
    router = RouterDriver(config=configured(auth={"api_keys": ["first-key"]}))
    call = router.call("GetServerInfo", authorization="Bearer \udcff")
    assert router.failure(call).status == Status.UNAUTHENTICATED


def test_health_needs_no_key(keyed: Server, channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_needs_no_key(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=WAIT_S)
    assert SERVICE in [service.name for service in answer.list_services_response.service]


async def test_the_official_client_works_with_a_key(keyed: Server) -> None:
    queue = f"queue-{uuid.uuid4().hex}"
    async with await SeppClient.connect(keyed.address, api_key="second-key") as client:
        await client.enqueue(job(queue, "a letter"))
        assert texts([await reserve_one(client, queue)]) == ["a letter"]


async def test_the_official_client_is_told_that_its_key_is_not_listed(keyed: Server) -> None:
    async with await SeppClient.connect(keyed.address, api_key="third-key") as client:
        with pytest.raises(UnauthenticatedError):
            await client.enqueue(job("mail"))


# -- rotation ---------------------------------------------------------------------------------------


def save(server: Server, text: str, event: str = "configuration reloaded") -> Entry:
    """Save the configuration, and wait for what the supervisor says of it."""
    known = {id(entry) for entry in server.log.entries}
    (server.home / "new").write_text(text)
    (server.home / "new").rename(server.home / "sepp.toml")
    return server.log.wait_for(lambda entry: id(entry) not in known and entry.get("event") == event)


async def until(channel: grpc.Channel, metadata: Metadata, expected: str) -> None:
    """The router hears of it after the supervisor has."""

    async def ask() -> None:
        while code(channel, metadata) != expected:
            await asyncio.sleep(0.01)

    await asyncio.wait_for(ask(), WAIT_S)


async def test_keys_are_exchanged_while_the_server_runs(new_server: StartServer) -> None:
    server = new_server(toml='[auth]\napi_keys = ["old-secret"]\n').start()
    with dialled(server.address) as channel:
        assert (code(channel, bearer("old-secret")), code(channel, bearer("new-secret"))) == ("OK", "UNAUTHENTICATED")
        assert save(server, '[auth]\napi_keys = ["old-secret", "new-secret"]\n')["keys"] == ["auth.api_keys"]
        await until(channel, bearer("new-secret"), "OK")
        assert code(channel, bearer("old-secret")) == "OK"
        save(server, '[auth]\napi_keys = ["new-secret"]\n')
        await until(channel, bearer("old-secret"), "UNAUTHENTICATED")
        assert code(channel, bearer("new-secret")) == "OK"
        save(server, ALL_REFUSED)
        await until(channel, bearer("new-secret"), "UNAUTHENTICATED")
        save(server, "")
        await until(channel, [], "OK")
    assert "secret" not in server.log.text()


async def test_a_broken_file_leaves_the_keys_as_they_were_and_shows_none(new_server: StartServer) -> None:
    server = new_server(toml='[auth]\napi_keys = ["old-secret"]\n').start()
    with dialled(server.address) as channel:
        for text in (
            '[auth]\napi_keys = ["new-secret", ""]\n',
            '[auth]\napi_key = ["new-secret"]\n',
            '[aut]\napi_keys = ["new-secret"]\n',
            'api_keys = ["new-secret"]\n',
            '[server]\napi_keys = ["new-secret"]\n',
            '[auth]\napi_keys = ["new-secret"\n',
        ):
            save(server, text, "configuration not reloaded, the running one stays")
            assert code(channel, bearer("old-secret")) == "OK"
            assert (code(channel, bearer("new-secret")), code(channel, [])) == ("UNAUTHENTICATED",) * 2
    assert "secret" not in server.log.text()


# -- TLS --------------------------------------------------------------------------------------------


def with_tls_files(server: Server) -> Server:
    """Put the files where the relative paths of the configuration lead to."""
    for name in ("server.crt", "server.key"):
        shutil.copy(TLS / name, server.home / name)
    return server


@pytest.fixture(scope="module", params=["queue", "aio"])
def encrypted(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of each front that speaks TLS and knows one key."""
    with Server(front=request.param, settings=WITH_TLS, toml='[auth]\napi_keys = ["first-key"]\n') as server:
        yield with_tls_files(server).start()


async def test_the_official_client_works_over_tls(encrypted: Server) -> None:
    queue = f"queue-{uuid.uuid4().hex}"
    connecting = SeppClient.connect(
        encrypted.address, api_key="first-key", tls=True, tls_ca_cert=CERTIFICATE, tls_domain=HOST
    )
    async with await connecting as client:
        await client.enqueue(job(queue, "a secret letter"))
        delivered = await reserve_one(client, queue, wait=NO_WAIT)
        assert texts([delivered]) == ["a secret letter"]
        await client.ack(delivered.ctx)


def test_a_key_is_needed_over_tls_too(encrypted: Server) -> None:
    with dialled(encrypted.address, trusting()) as channel:
        assert (code(channel, bearer("first-key")), code(channel, [])) == ("OK", "UNAUTHENTICATED")


def test_health_is_served_over_tls(encrypted: Server) -> None:
    with dialled(encrypted.address, trusting()) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_client_without_tls_gets_unavailable_from_a_port_with_it(encrypted: Server) -> None:
    with dialled(encrypted.address) as channel:
        assert code(channel, bearer("first-key")) == "UNAVAILABLE"
    with dialled(encrypted.address, trusting()) as channel:
        assert code(channel, bearer("first-key")) == "OK"


def test_a_client_that_does_not_trust_the_certificate_gets_unavailable(encrypted: Server) -> None:
    with dialled(encrypted.address, grpc.ssl_channel_credentials()) as channel:
        assert code(channel, bearer("first-key")) == "UNAVAILABLE"


def test_a_client_with_tls_gets_unavailable_from_a_port_without_it(keyed: Server) -> None:
    with dialled(keyed.address, trusting()) as channel:
        assert code(channel, bearer("first-key")) == "UNAVAILABLE"
    with dialled(keyed.address) as channel:
        assert code(channel, bearer("first-key")) == "OK"


async def test_the_official_client_cannot_connect_without_tls_to_a_port_with_it(encrypted: Server) -> None:
    with pytest.raises(ConnectError):
        await SeppClient.connect(encrypted.address, connect_timeout=timedelta(seconds=1))


def test_a_router_that_is_started_again_speaks_tls(new_server: StartServer) -> None:
    server = with_tls_files(new_server(settings=WITH_TLS)).start()
    server.kill("router-0")
    server.wait_until_back("router-0")
    with dialled(server.address, trusting()) as channel:
        assert code(channel, []) == "OK"


# -- files that cannot be used ----------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    for file in TLS.glob("server.*"):
        shutil.copy(file, tmp_path)
    return Shell(tmp_path)


Spoil = Callable[[Path], object]
SPOILT: list[tuple[str, Spoil, str]] = [
    (
        "no certificate",
        lambda home: (home / "server.crt").unlink(),
        'server.tls_cert_path is "server.crt", which cannot be read: No such file or directory',
    ),
    (
        "no key",
        lambda home: (home / "server.key").unlink(),
        'server.tls_key_path is "server.key", which cannot be read: No such file or directory',
    ),
    (
        "a folder",
        lambda home: ((home / "server.key").unlink(), (home / "server.key").mkdir()),
        'server.tls_key_path is "server.key", which cannot be read: Is a directory',
    ),
    (
        "an empty certificate",
        lambda home: (home / "server.crt").write_text(""),
        'server.tls_cert_path is "server.crt", which holds no certificate in PEM',
    ),
    (
        "a certificate that is none",
        lambda home: (home / "server.crt").write_bytes(b"\x30\x82\x00\xff junk"),
        'server.tls_cert_path is "server.crt", which holds no certificate in PEM',
    ),
    (
        "a key in the place of the certificate",
        lambda home: shutil.copy(TLS / "server.key", home / "server.crt"),
        'server.tls_cert_path is "server.crt", which holds no certificate in PEM',
    ),
    (
        "a key that is none",
        lambda home: (home / "server.key").write_text("junk\n"),
        'server.tls_key_path is "server.key", which holds no private key in PEM',
    ),
    (
        "the certificate in the place of the key",
        lambda home: shutil.copy(TLS / "server.crt", home / "server.key"),
        'server.tls_key_path is "server.key", which holds no private key in PEM',
    ),
    (
        "another key",
        lambda home: shutil.copy(TLS / "other.key", home / "server.key"),
        'server.tls_key_path is "server.key", which does not belong to the certificate in "server.crt"',
    ),
    (
        "a key with a passphrase",
        lambda home: shutil.copy(TLS / "locked.key", home / "server.key"),
        'server.tls_key_path is "server.key", which has a passphrase, and nobody can be asked for it',
    ),
]


@pytest.mark.parametrize(("spoil", "line"), [case[1:] for case in SPOILT], ids=[case[0] for case in SPOILT])
def test_what_is_wrong_with_tls_files_is_said_in_one_line(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, spoil: Spoil, line: str
) -> None:
    monkeypatch.chdir(shell.directory)
    server = ServerSection(tls_cert_path=Path("server.crt"), tls_key_path=Path("server.key"))
    assert read_tls(server) == (CERTIFICATE, (TLS / "server.key").read_bytes())
    spoil(shell.directory)
    with pytest.raises(ConfigError) as raised:
        read_tls(server)
    assert str(raised.value) == line


def test_a_start_with_tls_files_that_cannot_be_used_is_one_line_and_status_1(shell: Shell) -> None:
    shutil.copy(TLS / "other.key", shell.directory / "server.key")
    line = shell.fails("serve", "--listen-addr", "127.0.0.1:0", "--db-path", "data", **WITH_TLS)
    assert line == 'server.tls_key_path is "server.key", which does not belong to the certificate in "server.crt"'
    assert not (shell.directory / "data").exists()


def test_one_tls_file_alone_is_one_line_and_status_1(shell: Shell) -> None:
    line = shell.fails("serve", SEPP_SERVER__TLS_CERT_PATH="server.crt")
    assert line == "server.tls_key_path is unset; allowed: a path, because server.tls_cert_path is set"


def test_a_check_warns_of_tls_files_that_cannot_be_used(shell: Shell) -> None:
    shutil.copy(TLS / "other.key", shell.directory / "server.key")
    outcome = shell.run("config", "check", **WITH_TLS)
    assert (outcome.status, outcome.err) == (
        0,
        'seppd: warning: server.tls_key_path is "server.key", which does not belong to the certificate in '
        '"server.crt"\n',
    )


def test_a_router_that_finds_spoilt_files_says_so_and_comes_back_when_they_are_mended(new_server: StartServer) -> None:
    server = with_tls_files(new_server(settings=WITH_TLS)).start()
    (server.home / "server.key").rename(server.home / "away")
    server.kill("router-0")
    server.log.wait_for(
        lambda entry: (
            entry.get("event") == "child ended"
            and entry["reason"]
            == 'server.tls_key_path is "server.key", which cannot be read: No such file or directory'
        )
    )
    (server.home / "away").rename(server.home / "server.key")
    server.wait_until_back("router-0")
    with dialled(server.address, trusting()) as channel:
        assert code(channel, []) == "OK"


# -- config check -----------------------------------------------------------------------------------


def test_a_check_in_json_gives_values_with_their_source_and_hides_keys(shell: Shell) -> None:
    (shell.directory / "sepp.toml").write_text(f'{TWO_KEYS}[admin]\nport = 1\n[[queues]]\nname = "mail"\n')
    outcome = shell.run("config", "check", "--json", SEPP_LIMITS__MAX_RESERVE_BATCH="9")
    assert (outcome.status, outcome.err) == (0, "")
    shown = json.loads(outcome.out)
    values = shown["values"]
    assert shown["file"] == "sepp.toml"
    assert shown["warnings"] == ["[admin] has no use here and is ignored (sepp.toml)"]
    assert values["limits.max_reserve_batch"] == {"value": 9, "source": "environment"}
    assert values["limits.max_queue_depth"] == {"value": None, "source": "default"}
    assert values["queues[0]"] == {"value": {"name": "mail"}, "source": "file"}
    assert values["auth.api_keys"] == {
        "value": [{"name": "one", "key": "(hidden)"}, {"name": "two", "key": "(hidden)"}],
        "source": "file",
    }


def test_a_check_in_json_of_a_broken_file_is_one_line(shell: Shell) -> None:
    (shell.directory / "sepp.toml").write_text("[limits]\nmax_reserve_batch = 0\n")
    assert shell.fails("config", "check", "--json").startswith("limits.max_reserve_batch is 0; ")


def test_metrics_that_are_asked_for_get_a_warning(shell: Shell) -> None:
    outcome = shell.run("config", "check", SEPP_METRICS__PROMETHEUS_ENABLED="true")
    assert outcome.err == ("seppd: warning: metrics.prometheus_enabled is true: this version serves no metrics yet\n")


# -- HTTP/2 by hand ---------------------------------------------------------------------------------

DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4


def call_by_hand(address: str, authorization: bytes) -> bytes:
    """What a server answers to GetServerInfo with these bytes as authorization, frames and all."""
    host, _, port = address.rpartition(":")
    headers = b"".join(
        literal(name, value)
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", f"/{SERVICE}/GetServerInfo".encode()),
            (b":authority", b"test"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            (b"authorization", authorization),
        )
    )
    with socket.create_connection((host, int(port)), WAIT_S) as link:
        link.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(SETTINGS, 0, 0, b"")
            + frame(HEADERS, END_HEADERS, 1, headers)
            + frame(DATA, END_STREAM, 1, b"\0" + struct.pack("!I", 0) + pb.GetServerInfoRequest().SerializeToString())
        )
        return until_stream_ends(link)


def literal(name: bytes, value: bytes) -> bytes:
    """A header that is written out and not remembered."""
    assert len(name) < 127 and len(value) < 127
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("!I", len(payload))[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + payload


def until_stream_ends(link: socket.socket) -> bytes:
    """The headers and trailers of the first stream; nothing when the server closes it or the connection."""
    found = b""
    with link.makefile("rb") as frames:
        while head := frames.read(9):
            size, kind, flags, stream = (
                int.from_bytes(head[:3], "big"),
                head[3],
                head[4],
                int.from_bytes(head[5:], "big"),
            )
            payload = frames.read(size)
            if stream != 1:
                continue
            if kind == HEADERS:
                found += payload
            if flags & END_STREAM and kind in (DATA, HEADERS):
                return found
            if kind not in (DATA, HEADERS):
                return b""
    return b""
