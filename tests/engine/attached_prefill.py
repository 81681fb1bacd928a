"""The stack's prefill engine with another sidecar, which tests can kill and set as they like."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.engine.attached import AttachedSidecar
from tests.engine.engine_link import EngineLink
from tests.engine.leased import until_served
from tests.engine.world import World


@dataclass(frozen=True)
class AttachedPrefill:
    """The sidecar, and its way to the engine."""

    sidecar: AttachedSidecar
    link: EngineLink


@asynccontextmanager
async def attached_prefill(
    world: World, args: Sequence[str] = ()
) -> AsyncIterator[AttachedPrefill]:
    """Put it in the place of the stack's own sidecar while the block runs.

    Args:
        world: its decode worker must be running.
        args: flags of the sidecar.
    """
    await world.stack.stop("prefill-0")
    engine = world.prefill_engine
    async with EngineLink(engine.engine_port) as link:
        sidecar = AttachedSidecar(
            engine,
            engine_url=link.url,
            kvmeta=world.stack.kvmeta_address,
            log=world.stack.run_dir / "prefill-attached.log",
            args=args,
        )
        try:
            await sidecar.start()
            await until_served(world)
            yield AttachedPrefill(sidecar, link)
        finally:
            await sidecar.stop()
    await world.stack.start("prefill-0")
