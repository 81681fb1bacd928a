"""Turns through router, kvmeta and two sidecars that all speak mutual TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvloop import AsyncClient, rpc
from kvloop.cli import main
from kvloop.errors import PermissionDeniedError, TlsError
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from kvloop.tls import ClientTlsFiles
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.flow.gateway.fleet import Fleet
from tests.flow.sim.engines import MODEL
from tests.flow.tls.authority import Authority, Identity
from tests.flow.tls.secured import messages, secured_fleet, turn


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def _two_turns(client: AsyncClient, conversation: str) -> None:
    """Of which the second gets the handle that the first has left."""
    first = await turn(client, conversation, "what is it?", max_tokens=8)
    second = await turn(client, conversation, "what is it?", first.text, "and why?", max_tokens=8)
    assert second.receipt.handle_hit


async def _over_https(stack: Fleet, authority: Authority, me: Identity) -> int:
    context = ssl.create_default_context(cafile=str(authority.file))
    context.load_cert_chain(me.certificate, me.key)
    body: dict[str, Any] = {"model": MODEL, "messages": messages("hi"), "max_tokens": 4}
    url = f"https://{stack.host}:{stack.router.gateway_port}/v1/chat/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, ssl=context) as reply,
    ):
        return reply.status


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_E3_turns_reuse_kv_over_mutual_tls(
    tmp_path: Path, authority: Authority, host: str
) -> None:
    """The engines' side channels are on the same kind of address."""
    side_channel = host.strip("[]")
    me = authority.issue("operator")
    async with secured_fleet(
        tmp_path, authority, host=host, side_channel_host=side_channel
    ) as stack:
        address = f"{host}:{stack.router.port}"
        async with AsyncClient(address, tls=authority.client(me)) as client:
            first = await turn(client, "c1", "what is it?")
            second = await turn(client, "c1", "what is it?", first.text, "and why?")
            assert second.receipt.pulled_tokens > 0
        assert await _over_https(stack, authority, me) == 200
        registered = stack.router.pool.models()[0].decode[0]
        assert registered.traits.side_channel_host == side_channel
        assert registered.address == f"{host}:{stack.workers[1].port}"


async def test_sidecars_take_legs_from_routers_alone(tmp_path: Path, authority: Authority) -> None:
    """So transfer params come from the ledger, by way of a router, and from nobody else."""
    async with secured_fleet(tmp_path, authority) as stack:
        for part in ("operator", "guest"):
            tls = authority.client(authority.issue(part), server_name="worker.kvloop")
            with pytest.raises(PermissionDeniedError), rpc.typed_errors():
                await _prefill(stack, tls)
        for tls_source in (None, authority.client(None, server_name="worker.kvloop")):
            with pytest.raises(TlsError), rpc.typed_errors():
                await _prefill(stack, tls_source)
        assert (await stack.prefill.state())["running"] == []


async def _prefill(stack: Fleet, tls: ClientTlsFiles | None) -> None:
    async with rpc.open_channel(f"{stack.host}:{stack.workers[0].port}", tls) as channel:
        await worker_pb2_grpc.WorkerServiceStub(channel).Prefill(worker_pb2.PrefillRequest())


async def test_kvmeta_takes_calls_from_services_and_operators_alone(
    tmp_path: Path, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    async with secured_fleet(tmp_path, authority) as stack:
        address = f"{stack.host}:{stack.kvmeta.port}"
        guest = authority.client(authority.issue("guest"))
        async with rpc.open_channel(address, guest) as channel:
            stub = ledger_pb2_grpc.LedgerServiceStub(channel)
            with pytest.raises(PermissionDeniedError), rpc.typed_errors():
                await stub.TakeHandle(ledger_pb2.TakeHandleRequest())
        me = authority.issue("operator")
        options = [
            *("--tls-ca-file", str(authority.file)),
            *("--tls-certificate-file", str(me.certificate)),
            *("--tls-key-file", str(me.key)),
        ]
        command = [*options, "workers", "--kvmeta", address]
        assert await asyncio.to_thread(_run_command, command) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == [
            "decode-0",
            "prefill-0",
        ]


def _run_command(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(str(caught.value.code))


def _reload(stack: Fleet) -> None:
    """What SIGHUP does, to every service."""
    stack.kvmeta.reload()
    stack.router.reload()
    for worker in stack.workers:
        worker.reload()


async def test_all_certificates_are_replaced_under_a_stream_without_a_failed_turn(
    tmp_path: Path, authority: Authority
) -> None:
    me = authority.issue("operator")
    async with secured_fleet(tmp_path, authority, preset="tiny-cpu") as stack:
        address = f"{stack.host}:{stack.router.port}"
        async with AsyncClient(address, tls=authority.client(me)) as client:
            long = client.chat(messages("go on"), model=MODEL, max_tokens=4000, ignore_eos=True)
            await anext(long)

            (tmp_path / "other").mkdir()
            other = Authority(tmp_path / "other")
            authority.file.write_bytes(authority.pem + other.pem)
            _reload(stack)
            await _two_turns(client, "c1")

            other.folder = authority.folder
            for part in ("kvmeta", "router", "operator"):
                other.issue(part)
            other.issue("worker", "anywhere.example")
            _reload(stack)
            await _two_turns(client, "c2")

            authority.file.write_bytes(other.pem)
            _reload(stack)
            await _two_turns(client, "c3")
            async with AsyncClient(address, tls=other.client(me)) as newcomer:
                await _two_turns(newcomer, "c4")
            assert (await anext(long)).text  # of a turn that began under the first authority
            long.close()
        assert await _over_https(stack, other, me) == 200
        assert stack.count("fallbacks_total", cause="prefill_repeated") == 0
