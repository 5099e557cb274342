"""The hold on the port that the routers share."""

from __future__ import annotations

import errno
import socket

import pytest

from common.listen_address import ListenAddress, ListenAddressError, hold


def test_an_address_is_written_with_brackets_around_ipv6_only() -> None:
    assert str(ListenAddress("127.0.0.1", 1)) == "127.0.0.1:1"
    assert str(ListenAddress("::1", 1)) == "[::1]:1"


def test_port_0_becomes_a_free_port() -> None:
    with hold(ListenAddress("127.0.0.1", 0)) as held:
        assert held.address.host == "127.0.0.1"
        assert 1024 <= held.address.port <= 65_535


def test_a_name_becomes_one_literal_address() -> None:
    with hold(ListenAddress("localhost", 0)) as held:
        assert held.address.host == "127.0.0.1"


def test_ipv6_can_be_held() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with hold(ListenAddress("::1", 0)) as held:
        assert str(held.address) == f"[::1]:{held.address.port}"


@pytest.mark.parametrize("reuse_port", [0, 1])
def test_a_port_with_a_listener_is_in_use_even_when_it_would_share(reuse_port: int) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            ListenAddressError, match=rf"^listen address 127\.0\.0\.1:{port} is in use by another process"
        ):
            hold(ListenAddress("127.0.0.1", port))


def test_a_port_that_another_supervisor_holds_is_in_use_before_its_routers_listen() -> None:
    with hold(ListenAddress("127.0.0.1", 0)) as first, pytest.raises(ListenAddressError, match="is in use"):
        hold(first.address)


def test_routers_can_listen_on_a_held_port_and_get_every_connection() -> None:
    with hold(ListenAddress("127.0.0.1", 0)) as held, socket.socket() as router:
        router.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        router.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        router.bind((held.address.host, held.address.port))
        router.listen()
        router.settimeout(20)
        for _ in range(20):
            with socket.create_connection((held.address.host, held.address.port), timeout=20):
                router.accept()[0].close()


def test_a_port_can_be_held_again_after_connections_of_an_earlier_server() -> None:
    with hold(ListenAddress("127.0.0.1", 0)) as held, socket.socket() as router:
        router.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        router.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        router.bind((held.address.host, held.address.port))
        router.listen()
        router.settimeout(20)
        with socket.create_connection((held.address.host, held.address.port), timeout=20):
            router.accept()[0].close()  # the server closes first: TIME_WAIT stays on its side
    with hold(held.address) as again:
        assert again.address == held.address


def test_a_held_port_without_routers_refuses_connections() -> None:
    with hold(ListenAddress("127.0.0.1", 0)) as held:
        with pytest.raises(OSError) as caught:
            socket.create_connection((held.address.host, held.address.port), timeout=20)
        assert caught.value.errno == errno.ECONNREFUSED


def test_an_address_of_another_machine_cannot_be_held() -> None:
    with pytest.raises(ListenAddressError, match=r"192\.0\.2\.1:0 cannot be used \("):
        hold(ListenAddress("192.0.2.1", 0))


def test_a_name_that_nobody_knows_cannot_be_held() -> None:
    with pytest.raises(ListenAddressError, match="the host is not known"):
        hold(ListenAddress("no-such-host.invalid", 0))
