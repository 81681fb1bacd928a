"""A closed loop of turns: take, commit, next conversation."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field

from google.protobuf.duration_pb2 import Duration

from bench.ledger import rows
from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc


@dataclass
class Measured:
    """Seconds of every call, and of the whole run."""

    take: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)
    hits: int = 0
    elapsed: float = 0.0

    @property
    def pairs_per_second(self) -> float:
        """Take and commit together, completed per second."""
        return len(self.commit) / self.elapsed


async def run(
    port: int, *, conversations: int, params: bytes, concurrency: int, seconds: float, seed: int
) -> Measured:
    """Run turns of random conversations for a while.

    Args:
        port: of the ledger on this machine.
        conversations: how many there are to choose from.
        params: what each turn commits.
        concurrency: turns at once.
        seconds: for how long.
        seed: of the choice.
    """
    measured = Measured()
    choose = random.Random(seed)
    serial = itertools.count()
    end = time.perf_counter() + seconds

    async def turns(ledger: ledger_pb2_grpc.LedgerServiceAsyncStub, client: int) -> None:
        # Each client has conversations of its own, so that every take is a hit.
        mine = range(client, conversations, concurrency)
        while time.perf_counter() < end:
            key = common_pb2.ConversationKey(
                tenant=rows.TENANT,
                model=rows.MODEL,
                conversation_id=rows.name(choose.choice(mine)),
            )
            request_id = f"{seed}-{next(serial)}"
            began = time.perf_counter()
            taken = await ledger.TakeHandle(
                ledger_pb2.TakeHandleRequest(key=key, request_id=request_id)
            )
            between = time.perf_counter()
            await ledger.CommitTurn(
                ledger_pb2.CommitTurnRequest(
                    key=key,
                    request_id=request_id,
                    turn=taken.turn,
                    worker_id=rows.WORKER_ID,
                    engine=common_pb2.EngineRef(
                        engine_id=rows.ENGINE.engine_id, epoch=rows.ENGINE.epoch
                    ),
                    transfer_params_json=params,
                    engine_ttl=Duration(seconds=3600),
                    num_tokens=1000,
                    num_blocks=32,
                )
            )
            done = time.perf_counter()
            measured.hits += taken.HasField("handle")
            measured.take.append(between - began)
            measured.commit.append(done - between)

    async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
        ledger = ledger_pb2_grpc.LedgerServiceStub(channel)
        began = time.perf_counter()
        await asyncio.gather(*(turns(ledger, client) for client in range(concurrency)))
        measured.elapsed = time.perf_counter() - began
    return measured
