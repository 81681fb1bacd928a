"""`kvloop up --tls`: every service a process of its own, certificates made for it."""

from __future__ import annotations

import hashlib
import os
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kvloop import AsyncClient, ClientTlsFiles
from kvloop.errors import TlsError, UnauthenticatedError
from kvloop.stack import Stack, StackSettings, WorkerSettings
from kvloop.stack.certificates import Part, make_certificates
from tests.flow.patience import PATIENT_ROUTER, PATIENT_WORKER, flags
from tests.flow.sim.engines import MODEL, engine, poll
from tests.flow.tls.secured import turn

KEY = "key-of-nobody-e7a1"
"""An API key that must not show up in any log."""
QUESTION = "xylophone quartz"
PROMPT_TOKENS = [1701, 1733, 1709, 1747] * 40
DEBUG = "--log-level=debug"


@asynccontextmanager
async def _secured_stack(run_dir: Path) -> AsyncIterator[Stack]:
    """A stack on simulated engines, which needs API keys and logs all it can."""
    keys = run_dir / "keys"
    keys.write_text(f"team {hashlib.sha256(KEY.encode()).hexdigest()}\n")
    workers = []
    async with AsyncExitStack() as stack:
        for role in ("prefill", "decode"):
            socket = run_dir / f"{role}-0.sock"
            simulated = await stack.enter_async_context(
                engine(role=role, events_socket=str(socket))
            )
            args = (f"--engine-url={simulated.url}", DEBUG, *flags(PATIENT_WORKER))
            workers.append(WorkerSettings(role=role, args=args))
        settings = StackSettings(
            model=MODEL,
            workers=tuple(workers),
            run_dir=run_dir,
            tls=True,
            kvmeta_args=(DEBUG,),
            router_args=(DEBUG, f"--api-keys-file={keys}", *flags(PATIENT_ROUTER)),
        )
        yield await stack.enter_async_context(Stack(settings))


def _client(stack: Stack, **more: str) -> AsyncClient:
    assert stack.certificates is not None
    return AsyncClient(stack.router_address, tls=stack.certificates.client_tls(), **more)


def _logs(stack: Stack) -> dict[str, str]:
    return {name: stack.log_path(name).read_text() for name in stack.names}


@pytest.mark.timeout(120)
async def test_D13_a_stack_with_tls_serves_and_logs_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLOOP_API_KEY", KEY)  # as the supervisor asks the router too
    async with _secured_stack(tmp_path) as stack:
        async with _client(stack) as client:
            first = await turn(client, "c1", QUESTION)
            second = await turn(client, "c1", QUESTION, first.text, "and why?")
            assert second.receipt.pulled_tokens > 0
            tokens = await client.generate(PROMPT_TOKENS, model=MODEL, max_tokens=8).collect()
        async with _client(stack, api_key=f"{KEY}-wrong") as intruder:
            with pytest.raises(UnauthenticatedError):
                await intruder.models()
        assert await _over_https(stack) == 200
        async with AsyncClient(stack.router_address) as plain:
            with pytest.raises(TlsError):
                await plain.models()
        logs = _logs(stack)
    assert all('"event"' in log for log in logs.values())
    ids = (", ".join, ",".join)
    secrets = [
        KEY,
        QUESTION,
        first.text[:40],
        second.text[:40],
        tokens.text[:30],
        *(join([str(token) for token in PROMPT_TOKENS[:4]]) for join in ids),
        "PRIVATE KEY",
        "remote_block_ids",
        "kvloop_proof",
    ]
    found = [(name, secret) for name, log in logs.items() for secret in secrets if secret in log]
    assert found == []


async def _over_https(stack: Stack) -> int:
    assert stack.certificates is not None
    made = stack.certificates
    context = ssl.create_default_context(cafile=str(made.authority))
    context.load_cert_chain(made.certificate(Part.OPERATOR), made.key(Part.OPERATOR))
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as session,
        session.post(
            f"{stack.gateway_url}/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]},
            ssl=context,
        ) as reply,
    ):
        return reply.status


@pytest.mark.timeout(120)
async def test_a_hangup_makes_every_service_read_its_files_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLOOP_API_KEY", KEY)
    reads = {
        "kvmeta": ["certificate_reloaded"],
        "router": ["api_keys_reloaded", "certificate_reloaded", "peer_certificate_reloaded"],
        "prefill-0": ["certificate_reloaded", "peer_certificate_reloaded"],
    }
    async with _secured_stack(tmp_path) as stack:
        for name, events in reads.items():
            pid = stack.pid(name)
            assert pid is not None
            os.kill(pid, signal.SIGHUP)
            await poll(lambda n=name, e=events: all(f'"{x}"' in _logs(stack)[n] for x in e))  # type: ignore[misc]
        async with _client(stack) as client:
            assert [model.name for model in await client.models()] == [MODEL]


async def test_certificates_of_a_stack_are_for_its_parts_alone(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls")
    assert (tmp_path / "tls").stat().st_mode & 0o777 == 0o700
    assert {path.suffix for path in (tmp_path / "tls").iterdir()} == {".pem", ".key"}
    assert not (tmp_path / "tls" / "ca.key").exists()
    assert isinstance(made.client_tls(), ClientTlsFiles)
