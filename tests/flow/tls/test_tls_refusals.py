"""Who is not let in, and in which words both ends hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from kvloop import AsyncClient, Client, rpc
from kvloop.cli import main
from kvloop.errors import KvloopError, PermissionDeniedError, TlsError, UnavailableError
from kvloop.tls import TlsSource
from services.common.tls import ServerFiles, ServerTls
from services.router.worker_client import GrpcWorkerClient
from tests.flow.tls import echo
from tests.flow.tls.authority import Authority
from tests.flow.tls.echo import Echo


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    """An authority that the server does not know."""
    (tmp_path / "other").mkdir()
    return Authority(tmp_path / "other")


@pytest.fixture
async def server(authority: Authority) -> AsyncIterator[Echo]:
    """Mutual TLS, for routers and operators."""
    tls = ServerTls(
        authority.server(authority.issue("server")),
        allowed_clients=["router.kvloop", "spiffe://kvloop/operator"],
        clock=asyncio.get_running_loop().time,
    )
    async with echo.serve(tls) as serving:
        yield serving


async def _who(port: int, tls: TlsSource | None) -> str:
    with rpc.typed_errors():
        async with rpc.open_channel(f"127.0.0.1:{port}", tls) as channel:
            return await echo.who(channel)


async def _trouble(port: int, tls: TlsSource | None) -> TlsError:
    with pytest.raises(TlsError) as caught:
        await _who(port, tls)
    assert "127.0.0.1" not in caught.value.message
    return caught.value


async def test_a_client_on_the_list_is_let_in(server: Echo, authority: Authority) -> None:
    assert "router.kvloop" in await _who(server.port, authority.client(authority.issue("router")))


async def test_a_certificate_with_another_name_is_denied_by_name(
    server: Echo, authority: Authority
) -> None:
    worker = authority.client(authority.issue("worker"))
    with capture_logs() as logged, pytest.raises(PermissionDeniedError) as caught:
        await _who(server.port, worker)
    assert caught.value.reason == "CLIENT_NOT_ALLOWED"
    assert "worker.kvloop" in caught.value.message
    refused = next(entry for entry in logged if entry["event"] == "client_refused")
    assert refused == {
        "event": "client_refused",
        "log_level": "warning",
        "method": echo.WHO,
        "names": "localhost, worker.kvloop",
    }


async def test_streams_are_denied_before_their_first_answer(
    server: Echo, authority: Authority
) -> None:
    worker = authority.client(authority.issue("worker"))
    await server.ticks.put(b"secret")
    async with rpc.open_channel(f"127.0.0.1:{server.port}", worker) as channel:
        tick: Any = channel.unary_stream(echo.TICK)
        with pytest.raises(PermissionDeniedError), rpc.typed_errors():
            await tick(b"").read()
    assert server.ticks.qsize() == 1


async def test_health_is_for_every_certificate_of_the_authority(
    server: Echo, authority: Authority
) -> None:
    probe = authority.client(authority.issue("probe"))
    async with rpc.open_channel(f"127.0.0.1:{server.port}", probe) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_client_without_certificate_is_refused(server: Echo, authority: Authority) -> None:
    trouble = await _trouble(server.port, authority.client(None))
    assert (trouble.reason, "does not accept the client's certificate" in trouble.message) == (
        "TLS_REFUSED",
        True,
    )


async def test_an_expired_certificate_is_refused(server: Echo, authority: Authority) -> None:
    expired = authority.client(authority.issue("router", expired=True))
    assert (await _trouble(server.port, expired)).reason == "TLS_REFUSED"


async def test_a_certificate_of_another_authority_is_refused(
    server: Echo, authority: Authority, stranger: Authority
) -> None:
    foreign = stranger.issue("router")
    trouble = await _trouble(server.port, authority.client(foreign))
    assert trouble.reason == "TLS_REFUSED"


async def test_a_server_of_another_authority_is_not_trusted(
    server: Echo, stranger: Authority
) -> None:
    trouble = await _trouble(server.port, stranger.client(None))
    assert trouble.reason == "CERTIFICATE_NOT_TRUSTED"
    assert "unable to get local issuer certificate" in trouble.message


async def test_a_server_with_an_expired_certificate_is_not_trusted(authority: Authority) -> None:
    identity = authority.issue("server", expired=True)
    files = ServerFiles(identity.certificate, identity.key)
    tls = ServerTls(files, clock=asyncio.get_running_loop().time)
    async with echo.serve(tls) as serving:
        trouble = await _trouble(serving.port, authority.client(None))
    assert "certificate has expired" in trouble.message


async def test_names_are_verified_unless_another_is_expected(authority: Authority) -> None:
    """One certificate for all workers, wherever they run."""
    files = authority.server(authority.issue("worker", "elsewhere.example"))
    tls = ServerTls(files, clock=asyncio.get_running_loop().time)
    router = authority.issue("router")
    async with echo.serve(tls) as serving:
        trouble = await _trouble(serving.port, authority.client(router))
        assert trouble.reason == "CERTIFICATE_OF_ANOTHER"
        named = authority.client(router, server_name="worker.kvloop")
        assert "router.kvloop" in await _who(serving.port, named)


async def test_tls_to_a_plain_text_server_is_told_in_words(authority: Authority) -> None:
    async with echo.serve(None) as serving:
        trouble = await _trouble(serving.port, authority.client(None))
    assert trouble.reason == "TLS_NOT_SPOKEN"
    assert trouble.message.startswith("the server speaks plain text")


async def test_plain_text_to_a_tls_server_is_told_by_both_clients(server: Echo) -> None:
    address = f"127.0.0.1:{server.port}"
    async with AsyncClient(address) as client:
        with pytest.raises(TlsError, match="it speaks TLS and this client does not"):
            await client.models()

    def ask() -> None:
        with Client(address) as client:
            client.models()

    with pytest.raises(TlsError, match="it speaks TLS and this client does not"):
        await asyncio.to_thread(ask)


@pytest.mark.parametrize(
    "command",
    [["workers", "--kvmeta"], ["conversations", "--kvmeta"], ["generate", "x", "--router"]],
)
async def test_plain_text_to_a_tls_server_is_told_by_the_command(
    server: Echo, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    def run() -> int:
        with pytest.raises(SystemExit) as caught:
            main([*command, f"127.0.0.1:{server.port}"])
        return int(str(caught.value.code))

    assert await asyncio.to_thread(run) == 3
    assert "it speaks TLS and this client does not" in capsys.readouterr().err


async def test_a_router_says_why_it_cannot_reach_a_worker(
    server: Echo, stranger: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "_WHY_TIMEOUT_SECONDS", 20.0)
    channel = rpc.make_aio_channel(f"127.0.0.1:{server.port}", stranger.client(None))
    async with channel:
        with pytest.raises(UnavailableError) as caught:
            await GrpcWorkerClient("decode-0", channel).connect(timeout_seconds=20)
    assert caught.value.reason == "WORKER_UNREACHABLE"
    assert "not trusted by the authorities" in caught.value.message


@pytest.mark.parametrize("address", ["http://127.0.0.1:7100", "https://router:7100"])
def test_urls_are_refused_where_addresses_are_wanted(address: str) -> None:
    with pytest.raises(KvloopError, match="is a URL; expected host:port"):
        Client(address)
