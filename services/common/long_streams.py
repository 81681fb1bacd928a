"""Streams that would last as long as their peer, ended and opened anew now and then.

A stream stays on the connections that it was opened on. So the addresses that were right
then are called on for as long as it lasts, whoever has them later: see
`services.common.replicated_channel`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, TypeVar, cast

import grpc

from kvloop.errors import UnavailableError
from kvloop.rpc import typed_errors

LONGEST_SECONDS = 600.0
"""How long such a stream lasts; whoever reads it then opens the next."""

M = TypeVar("M")


async def messages(call: grpc.aio.UnaryStreamCall[Any, M]) -> AsyncGenerator[M, None]:
    """What a stream brings until its time is up. Afterwards it is cancelled.

    Args:
        call: the stream.

    Raises:
        KvloopError: the stream has failed.
        UnavailableError: its server has ended it.
    """
    ends = asyncio.get_running_loop().time() + LONGEST_SECONDS
    try:
        while True:
            try:
                async with asyncio.timeout_at(ends):
                    with typed_errors():
                        message = await call.read()
            except TimeoutError:
                return
            if message is grpc.aio.EOF:
                raise UnavailableError("the server ended the stream")
            yield cast(M, message)
    finally:
        call.cancel()
