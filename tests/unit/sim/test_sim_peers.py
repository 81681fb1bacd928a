"""Whatever carries the side channel, it behaves the same."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.sim import tcp_peers
from services.sim.core import EngineCore
from services.sim.http_server import bind
from services.sim.kv import encode_tokens
from services.sim.peers import PeerError, Peers
from services.sim.pins import Pin
from services.sim.tcp_peers import TcpPeers
from tests.unit.sim.lab import Lab


@pytest.fixture
def engine(lab: Lab) -> EngineCore:
    return lab.engine()


@pytest.fixture(params=["in memory", "tcp", "tcp over IPv6"])
async def reached(
    request: pytest.FixtureRequest, lab: Lab, engine: EngineCore
) -> AsyncIterator[tuple[Peers, str, int]]:
    """Peers, and the address at which they find the engine."""
    if request.param == "in memory":
        yield lab.peers, engine.spec.side_channel_host, engine.spec.side_channel_port
        return
    host = "::1" if "IPv6" in request.param else "127.0.0.1"
    with bind(host, 0) as listener:
        async with tcp_peers.serve(engine.side_channel, listener):
            yield TcpPeers(), host, listener.getsockname()[1]


async def test_a_handshake_tells_who_and_what_time(reached, engine: EngineCore) -> None:
    peers, host, port = reached
    info = await peers.meet(host, port)
    assert (info.engine_id, info.epoch) == (engine.identity.engine_id, engine.identity.epoch)
    assert info.clock == engine.now()


async def test_a_read_gives_the_blocks_asked_for_and_frees_the_pin(
    reached, engine: EngineCore
) -> None:
    peers, host, port = reached
    blocks = engine.pool.allocate(3) or []
    for block in blocks:
        engine.pool.memory[block] = ((b"s" * 16, encode_tokens([block])), (b"t" * 16, b""))
    engine.pins.add(Pin("request", blocks, engine.now() + 100))
    epoch = engine.identity.epoch
    contents = await peers.read(host, port, epoch, blocks[1:], "request")
    assert contents == [engine.pool.memory[block] for block in blocks[1:]]
    assert engine.pool.num_used == 0


async def test_a_read_of_blocks_that_do_not_exist_fails(reached, engine: EngineCore) -> None:
    peers, host, port = reached
    with pytest.raises(PeerError, match="no such block"):
        await peers.read(host, port, engine.identity.epoch, [10**6], "request")


async def test_a_notification_frees_the_pin(reached, engine: EngineCore) -> None:
    peers, host, port = reached
    engine.pins.add(Pin("request", engine.pool.allocate(3) or [], engine.now() + 100))
    await peers.notify(host, port, engine.identity.epoch, "request")
    assert engine.pool.num_used == 0


async def test_a_renewal_extends_by_two_thirds_of_a_lease(reached, engine: EngineCore) -> None:
    peers, host, port = reached
    engine.pins.add(Pin("request", engine.pool.allocate(3) or [], engine.now() + 5))
    await peers.renew(host, port, engine.identity.epoch, ["request", "unknown"])
    assert engine.pins.next_deadline() == engine.now() + 20


async def test_who_knows_another_life_is_refused(reached) -> None:
    peers, host, port = reached
    for call in (
        peers.read(host, port, "old", [1], "r"),
        peers.notify(host, port, "old", "r"),
        peers.renew(host, port, "old", ["r"]),
    ):
        with pytest.raises(PeerError, match="restarted"):
            await call


async def test_nobody_there_is_an_error(reached) -> None:
    peers, host, _ = reached
    # Bound, and so nobody else's; it does not listen.
    with bind(host if ":" in host else "127.0.0.1", 0) as silent, pytest.raises(PeerError):
        await peers.meet(host, silent.getsockname()[1])
