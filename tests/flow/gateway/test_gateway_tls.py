"""TLS and mutual TLS at the front door, with certificates replaced while it serves."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme

from kvloop import AsyncClient
from kvloop.errors import KvloopError
from kvloop.tls import ClientTls
from tests.flow.router.memory_ledger import MODEL
from tests.flow.router.stack import Stack, running


class _Authority:
    """Writes certificates for this machine to files."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.certificate, self.key = folder / "server.pem", folder / "server.key"
        self.client_ca = folder / "clients.pem"
        self.ca.cert_pem.write_to_path(str(self.client_ca))
        self.issue()

    def issue(self) -> None:
        """A new certificate in the place of the one before."""
        made = self.ca.issue_cert("127.0.0.1", "localhost")
        self.key.write_bytes(made.private_key_pem.bytes())
        self.certificate.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))

    @property
    def root(self) -> bytes:
        return self.ca.cert_pem.bytes()

    def client(self) -> ClientTls:
        made = self.ca.issue_cert("client@kvloop")
        chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
        return ClientTls(self.root, chain, made.private_key_pem.bytes())

    def client_context(self, *, mutual: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.root.decode())
        if mutual:
            self.ca.issue_cert("client@kvloop").configure_cert(context)
        return context


class _Clock:
    """A clock whose seconds a test lets pass."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead


@pytest.fixture
def authority(tmp_path: Path) -> _Authority:
    return _Authority(tmp_path)


def _settings(authority: _Authority, *, mutual: bool = False) -> dict[str, Any]:
    return {
        "gateway_listen": "127.0.0.1:0",
        "tls_certificate_file": authority.certificate,
        "tls_key_file": authority.key,
        **({"tls_client_ca_file": authority.client_ca} if mutual else {}),
    }


async def _over_https(stack: Stack, context: ssl.SSLContext) -> int:
    url = f"https://127.0.0.1:{stack.router.gateway_port}/v1/models"
    async with aiohttp.ClientSession() as session, session.get(url, ssl=context) as reply:
        return reply.status


async def _over_grpc(stack: Stack, tls: ClientTls | None) -> list[str]:
    async with AsyncClient(f"127.0.0.1:{stack.router.port}", tls=tls) as client:
        return [model.name for model in await client.models()]


async def _serial(stack: Stack, context: ssl.SSLContext) -> str:
    """Serial number of the certificate that the gateway shows now."""
    _, writer = await asyncio.open_connection(
        "127.0.0.1", stack.router.gateway_port, ssl=context, server_hostname="127.0.0.1"
    )
    shown = writer.get_extra_info("ssl_object").getpeercert()
    writer.close()
    await writer.wait_closed()
    return str(shown["serialNumber"])


async def test_both_apis_speak_tls(authority: _Authority) -> None:
    async with running(settings=_settings(authority)) as stack:
        assert await _over_https(stack, authority.client_context()) == 200
        assert await _over_grpc(stack, ClientTls(authority.root)) == [MODEL]


async def test_plain_text_is_not_answered(authority: _Authority) -> None:
    async with running(settings=_settings(authority)) as stack:
        url = f"http://127.0.0.1:{stack.router.gateway_port}/health"
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(url)
        with pytest.raises(KvloopError):
            await _over_grpc(stack, None)


async def test_mutual_tls_wants_a_certificate_of_its_authority(
    authority: _Authority, tmp_path: Path
) -> None:
    stranger = trustme.CA().issue_cert("client@other")
    async with running(settings=_settings(authority, mutual=True)) as stack:
        assert await _over_https(stack, authority.client_context(mutual=True)) == 200
        assert await _over_grpc(stack, authority.client()) == [MODEL]
        with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
            await _over_https(stack, authority.client_context())
        foreign = authority.client_context()
        stranger.configure_cert(foreign)
        with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
            await _over_https(stack, foreign)
        with pytest.raises(KvloopError):
            await _over_grpc(stack, ClientTls(authority.root))


async def test_a_new_certificate_is_shown_without_a_restart(authority: _Authority) -> None:
    clock = _Clock()
    async with running(settings=_settings(authority), clock=clock) as stack:
        context = authority.client_context()
        before = await _serial(stack, context)
        assert await _serial(stack, context) == before
        authority.issue()
        clock.ahead += 2
        assert await _serial(stack, context) != before
        assert await _over_grpc(stack, ClientTls(authority.root)) == [MODEL]


async def test_files_that_do_not_fit_together_change_nothing(authority: _Authority) -> None:
    clock = _Clock()
    async with running(settings=_settings(authority), clock=clock) as stack:
        before = await _serial(stack, authority.client_context())
        key = authority.key.read_bytes()
        authority.key.write_bytes(trustme.CA().private_key_pem.bytes())
        clock.ahead += 2
        assert await _serial(stack, authority.client_context()) == before
        authority.key.write_bytes(key)
        clock.ahead += 2
        assert await _over_https(stack, authority.client_context()) == 200
