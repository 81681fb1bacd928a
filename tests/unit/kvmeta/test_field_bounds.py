"""Every bound that the protos document is checked, and the field is named."""

from __future__ import annotations

from copy import deepcopy

import pytest

from kvloop.common.v1 import common_pb2
from kvloop.errors import InvalidFieldError
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from kvloop.rpc import typed_errors
from tests.unit.kvmeta.messages import commit, conversation, register, seconds, take

LONG = "x" * 10_000


def spoil(message, path: str, value):
    """A copy of a message with one field changed."""
    spoilt = deepcopy(message)
    *parents, last = path.split(".")
    owner = spoilt
    for name in parents:
        owner = getattr(owner, name)
    if value is None:
        owner.ClearField(last)
    elif hasattr(value, "DESCRIPTOR"):
        getattr(owner, last).CopyFrom(value)
    else:
        setattr(owner, last, value)
    return spoilt


def texts(message, *paths: str):
    return [(message, path, value) for path in paths for value in (None, LONG, "a\x00b")]


KEY = ("key.tenant", "key.model", "key.conversation_id")
NEGATIVE, NOTHING, ENDLESS = seconds(-1), seconds(0), seconds(40 * 86_400)

LEDGER_CASES = [
    *(("TakeHandle", *case) for case in texts(take(), *KEY, "request_id")),
    *(
        ("CommitTurn", *case)
        for case in [
            *texts(commit(), *KEY, "request_id", "worker_id", "engine.engine_id", "engine.epoch"),
            (commit(), "turn", 2**64 - 1),
            (commit(), "transfer_params_json", None),
            (commit(), "engine_ttl", None),
            (commit(), "engine_ttl", NEGATIVE),
            (commit(), "engine_ttl", ENDLESS),
        ]
    ),
    *(
        ("ReturnHandle", *case)
        for case in texts(
            ledger_pb2.ReturnHandleRequest(key=conversation(), handle_id="h", request_id="r"),
            *KEY,
            "handle_id",
            "request_id",
        )
    ),
    *(
        ("ReleaseConversation", *case)
        for case in texts(ledger_pb2.ReleaseConversationRequest(key=conversation()), *KEY)
    ),
    *(
        (
            "ExtendConversation",
            ledger_pb2.ExtendConversationRequest(key=conversation(), ttl=seconds(1)),
            "ttl",
            value,
        )
        for value in (None, NEGATIVE, NOTHING, ENDLESS)
    ),
    *(
        ("GetConversation", *case)
        for case in texts(ledger_pb2.GetConversationRequest(key=conversation()), *KEY)
    ),
    *(
        ("ListConversations", ledger_pb2.ListConversationsRequest(tenant="t"), path, value)
        for path, value in [
            ("tenant", None),
            ("tenant", LONG),
            ("model", LONG),
            ("page_size", -1),
            ("page_size", 1001),
            ("page_token", "not a token"),
            ("page_token", "!"),
            ("page_token", "gqFjkA=="),
        ]
    ),
]

REGISTRY_CASES = [
    *(
        ("RegisterWorker", *case)
        for case in [
            *texts(
                register(),
                "worker.worker_id",
                "worker.model",
                "worker.address",
                "worker.engine.engine_id",
                "worker.engine.epoch",
                "worker.traits.vllm_version",
                "worker.traits.kv_connector",
                "worker.traits.kv_buffer_device",
                "worker.traits.side_channel_host",
                "worker.traits.kv_cache_dtype",
                "worker.traits.nixl_version",
            ),
            *(
                (register(), f"worker.traits.{name}", None)
                for name in (
                    "contract_version",
                    "block_size",
                    "tensor_parallel_size",
                    "pipeline_parallel_size",
                    "data_parallel_size",
                    "side_channel_port",
                    "max_model_len",
                    "num_kv_blocks",
                    "decoder_kv_blocks_ttl",
                )
            ),
            (register(), "worker.role", None),
            (register(), "worker.role", 9),
            (register(), "worker.state", 9),
            (register(), "worker.address", "127.0.0.1"),
            (register(), "worker.address", "http://127.0.0.1:7400"),
            (register(), "worker.address", "::1:7400"),
            (register(), "worker.address", "127.0.0.1:0"),
            (register(), "worker.traits.side_channel_host", "[::1]"),
            (register(), "worker.traits.side_channel_host", "host:5600"),
            (register(), "worker.traits.side_channel_host", "tcp://host"),
            (register(), "worker.traits.side_channel_port", 65_536),
            (register(), "worker.traits.num_kv_blocks", 2**64 - 1),
            (register(), "worker.traits.decoder_kv_blocks_ttl", NEGATIVE),
            (register(), "ttl", NEGATIVE),
            (register(), "ttl", ENDLESS),
        ]
    ),
    *(
        ("DeregisterWorker", *case)
        for case in texts(registry_pb2.DeregisterWorkerRequest(lease_id="l"), "lease_id")
    ),
    *(
        ("ListWorkers", registry_pb2.ListWorkersRequest(), path, value)
        for path, value in [
            ("model", LONG),
            ("role", 9),
            ("page_size", -1),
            ("page_size", 1001),
            ("page_token", "not a token"),
        ]
    ),
]


@pytest.mark.parametrize(("call", "message", "path", "value"), LEDGER_CASES)
async def test_the_ledger_names_the_field_at_fault(served, call, message, path, value) -> None:
    with pytest.raises(InvalidFieldError) as caught, typed_errors():
        await getattr(served.ledger, call)(spoil(message, path, value))
    assert caught.value.field == path


@pytest.mark.parametrize(("call", "message", "path", "value"), REGISTRY_CASES)
async def test_the_registry_names_the_field_at_fault(served, call, message, path, value) -> None:
    with pytest.raises(InvalidFieldError) as caught, typed_errors():
        await getattr(served.registry, call)(spoil(message, path, value))
    assert caught.value.field == path


async def test_streams_name_the_field_at_fault(served) -> None:
    watch = served.ledger.WatchReleases(ledger_pb2.WatchReleasesRequest())
    with pytest.raises(InvalidFieldError) as caught, typed_errors():
        await anext(aiter(watch))
    assert caught.value.field == "worker_id"

    async def renewals():
        yield spoil(registry_pb2.KeepAliveRequest(lease_id="l"), "state", 9)

    with pytest.raises(InvalidFieldError) as caught, typed_errors():
        await anext(aiter(served.registry.KeepAlive(renewals())))
    assert caught.value.field == "state"


async def test_what_the_protos_allow_is_accepted(served) -> None:
    request = register("w" * 128)
    request.worker.address = "[fd00::1]:7400"
    request.worker.model = "m" * 256
    request.worker.engine.engine_id = "e" * 256
    request.worker.engine.epoch = "p" * 64
    request.worker.traits.side_channel_host = "fd00::1"
    request.worker.traits.kv_recompute_threshold = 0
    await served.registry.RegisterWorker(request)
    key = common_pb2.ConversationKey(
        tenant="t" * 128, model="m" * 256, conversation_id="\u4f60\U0001f44d" * 128
    )
    made = commit(request_id="r" * 64)
    made.key.CopyFrom(key)
    made.worker_id = "w" * 128
    made.engine.CopyFrom(request.worker.engine)
    made.transfer_params_json = b"\x00\xff"
    made.num_tokens = 2**32 - 1
    await served.ledger.CommitTurn(made)
    taken = await served.ledger.TakeHandle(ledger_pb2.TakeHandleRequest(key=key, request_id="x"))
    assert taken.handle.transfer_params_json == b"\x00\xff"
    assert taken.handle.num_tokens == 2**32 - 1


async def test_a_prefill_worker_needs_no_ttl(served) -> None:
    request = register()
    request.worker.role = common_pb2.WORKER_ROLE_PREFILL
    request.worker.traits.ClearField("decoder_kv_blocks_ttl")
    await served.registry.RegisterWorker(request)
