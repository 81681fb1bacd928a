"""Between the messages of the protos and the values of model.py.

What comes in is checked on the way; every function that takes a message raises
InvalidFieldError with the path of the field at fault.
"""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from kvloop.common.v1 import common_pb2
from kvloop.errors import InvalidFieldError
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from services.kvmeta import bounds
from services.kvmeta.model import (
    MICROSECONDS,
    Commit,
    Conversation,
    ConversationKey,
    EngineRef,
    EngineTraits,
    Handle,
    MissReason,
    Release,
    Retained,
    Worker,
    WorkerRecord,
    WorkerRole,
    WorkerState,
)
from services.kvmeta.registry import Change
from services.kvmeta.store import Hit

_UINT32 = 2**32 - 1
_INT63 = 2**63 - 1


def key_from_proto(message: common_pb2.ConversationKey) -> ConversationKey:
    """A conversation's key, all of it required."""
    return ConversationKey(
        tenant=bounds.text(message.tenant, "key.tenant", most=bounds.MAX_TENANT),
        model=bounds.text(message.model, "key.model", most=bounds.MAX_MODEL),
        conversation_id=bounds.text(
            message.conversation_id, "key.conversation_id", most=bounds.MAX_CONVERSATION_ID
        ),
    )


def engine_from_proto(message: common_pb2.EngineRef, field: str) -> EngineRef:
    """One life of an engine, both parts required."""
    return EngineRef(
        engine_id=bounds.text(message.engine_id, f"{field}.engine_id", most=bounds.MAX_ENGINE_ID),
        epoch=bounds.text(message.epoch, f"{field}.epoch", most=bounds.MAX_EPOCH),
    )


def request_id_from_proto(value: str) -> str:
    """The id of a turn."""
    return bounds.text(value, "request_id", most=bounds.MAX_REQUEST_ID)


def commit_from_proto(message: ledger_pb2.CommitTurnRequest) -> Commit:
    """A finished turn. The size of its params is the ledger's business."""
    if not message.transfer_params_json:
        field = "transfer_params_json"
        raise InvalidFieldError(f"{field} is required", field=field)
    return Commit(
        key=key_from_proto(message.key),
        request_id=request_id_from_proto(message.request_id),
        turn=bounds.number(message.turn, "turn", least=0, most=bounds.MAX_TURN),
        worker_id=bounds.text(message.worker_id, "worker_id", most=bounds.MAX_WORKER_ID),
        engine=engine_from_proto(message.engine, "engine"),
        params=message.transfer_params_json,
        engine_ttl_us=bounds.duration_us(message.engine_ttl, "engine_ttl"),
        num_tokens=message.num_tokens,
        num_blocks=message.num_blocks,
        retention_ttl_us=bounds.duration_us(
            message.retention_ttl, "retention_ttl", zero_allowed=True
        ),
    )


def worker_from_proto(message: registry_pb2.Worker) -> Worker:
    """A worker that registers; its state defaults to ACTIVE."""
    role = role_from_proto(message.role, "worker.role")
    if role is None:
        raise InvalidFieldError("worker.role is required", field="worker.role")
    state = state_from_proto(message.state, "worker.state")
    return Worker(
        worker_id=bounds.text(message.worker_id, "worker.worker_id", most=bounds.MAX_WORKER_ID),
        role=role,
        address=bounds.address(message.address, "worker.address"),
        model=bounds.text(message.model, "worker.model", most=bounds.MAX_MODEL),
        engine=engine_from_proto(message.engine, "worker.engine"),
        traits=_traits_from_proto(message.traits, role),
        state=state or WorkerState.ACTIVE,
    )


def role_from_proto(value: common_pb2.WorkerRole.ValueType, field: str) -> WorkerRole | None:
    """A role; None if it is not set."""
    if value == common_pb2.WORKER_ROLE_UNSPECIFIED:
        return None
    if value not in common_pb2.WorkerRole.values():
        raise InvalidFieldError(f"{field} is {value}, which is no role", field=field)
    return WorkerRole(common_pb2.WorkerRole.Name(value).removeprefix("WORKER_ROLE_"))


def state_from_proto(value: registry_pb2.Worker.State.ValueType, field: str) -> WorkerState | None:
    """A worker's state; None if it is not set."""
    if value == registry_pb2.Worker.STATE_UNSPECIFIED:
        return None
    if value not in registry_pb2.Worker.State.values():
        raise InvalidFieldError(f"{field} is {value}, which is no state", field=field)
    return WorkerState(registry_pb2.Worker.State.Name(value).removeprefix("STATE_"))


def _traits_from_proto(message: registry_pb2.EngineTraits, role: WorkerRole) -> EngineTraits:
    def text(name: str) -> str:
        return bounds.text(getattr(message, name), _trait(name), most=bounds.MAX_TRAIT)

    def number(name: str, *, most: int = _UINT32) -> int:
        return bounds.number(getattr(message, name), _trait(name), least=1, most=most)

    # Only a decode engine that retains blocks has a TTL to speak of.
    retains = role is WorkerRole.DECODE and message.bidirectional_kv_xfer
    return EngineTraits(
        vllm_version=text("vllm_version"),
        contract_version=number("contract_version"),
        block_size=number("block_size"),
        tensor_parallel_size=number("tensor_parallel_size"),
        pipeline_parallel_size=number("pipeline_parallel_size"),
        data_parallel_size=number("data_parallel_size"),
        kv_connector=text("kv_connector"),
        kv_buffer_device=text("kv_buffer_device"),
        side_channel_host=bounds.bare_host(message.side_channel_host, _trait("side_channel_host")),
        side_channel_port=number("side_channel_port", most=65535),
        max_model_len=number("max_model_len"),
        num_kv_blocks=number("num_kv_blocks", most=_INT63),
        bidirectional_kv_xfer=message.bidirectional_kv_xfer,
        decoder_kv_blocks_ttl_us=bounds.duration_us(
            message.decoder_kv_blocks_ttl, _trait("decoder_kv_blocks_ttl"), zero_allowed=not retains
        ),
        kv_recompute_threshold=message.kv_recompute_threshold,
        hybrid_kv_cache=message.hybrid_kv_cache,
        lease_renewal=message.lease_renewal,
        kv_cache_dtype=text("kv_cache_dtype"),
        nixl_version=text("nixl_version"),
        pin_lease_us=bounds.duration_us(message.pin_lease, _trait("pin_lease"), zero_allowed=True),
        kv_block_bytes=bounds.number(
            message.kv_block_bytes, _trait("kv_block_bytes"), least=0, most=_INT63
        ),
        prepared_legs=message.prepared_legs,
    )


def _trait(name: str) -> str:
    return f"worker.traits.{name}"


def handle_to_proto(handle: Handle) -> ledger_pb2.Handle:
    """A handle with its params."""
    return ledger_pb2.Handle(
        handle_id=handle.handle_id,
        worker_id=handle.worker_id,
        engine=engine_to_proto(handle.engine),
        turn=handle.turn,
        transfer_params_json=handle.params,
        num_tokens=handle.num_tokens,
        num_blocks=handle.num_blocks,
        deadline_extension=duration(handle.deadline_extension_us),
    )


def hit_to_proto(hit: Hit) -> ledger_pb2.Handle:
    """The handle that a take got."""
    row = hit.conversation
    return handle_to_proto(
        Handle(
            handle_id=row.handle_id,
            worker_id=row.worker_id,
            engine=row.engine,
            turn=row.turn,
            params=hit.params,
            num_tokens=row.num_tokens,
            num_blocks=row.num_blocks,
            deadline_extension_us=row.deadline_extension_us,
        )
    )


def miss_reason_to_proto(reason: MissReason) -> common_pb2.MissReason.ValueType:
    """A reason under its common name."""
    return common_pb2.MissReason.Value(f"MISS_REASON_{reason.value}")


def release_to_proto(release: Release) -> ledger_pb2.WatchReleasesResponse:
    """A release as its watcher gets it."""
    return ledger_pb2.WatchReleasesResponse(
        revision=release.revision,
        engine=engine_to_proto(release.handle.engine),
        handle=handle_to_proto(release.handle),
        cause=ledger_pb2.WatchReleasesResponse.Cause.Value(f"CAUSE_{release.cause.value}"),
    )


def conversation_to_proto(row: Conversation, now_us: int, until_us: int) -> ledger_pb2.Conversation:
    """A conversation as it is now, whose handle is given out until then."""
    message = ledger_pb2.Conversation(
        key=key_to_proto(row.key),
        state=ledger_pb2.Conversation.State.Value(f"STATE_{row.state.value}"),
        turn=row.turn,
        worker_id=row.worker_id,
        num_tokens=row.num_tokens,
        num_blocks=row.num_blocks,
        commit_time=timestamp(row.commit_time_us),
        expire_time=timestamp(until_us),
        remaining_ttl=duration(max(0, until_us - now_us)),
        revision=row.revision,
        renewable=row.retention_ttl_us > 0,
    )
    if row.conversation_ttl_us is not None:
        message.conversation_ttl.CopyFrom(duration(row.conversation_ttl_us))
    return message


def key_to_proto(key: ConversationKey) -> common_pb2.ConversationKey:
    """A conversation's key."""
    return common_pb2.ConversationKey(
        tenant=key.tenant, model=key.model, conversation_id=key.conversation_id
    )


def engine_to_proto(engine: EngineRef) -> common_pb2.EngineRef:
    """One life of an engine."""
    return common_pb2.EngineRef(engine_id=engine.engine_id, epoch=engine.epoch)


def worker_to_proto(worker: Worker) -> registry_pb2.Worker:
    """A worker as it registered, with its state now."""
    traits = worker.traits
    return registry_pb2.Worker(
        worker_id=worker.worker_id,
        role=common_pb2.WorkerRole.Value(f"WORKER_ROLE_{worker.role.value}"),
        address=worker.address,
        model=worker.model,
        engine=engine_to_proto(worker.engine),
        traits=registry_pb2.EngineTraits(
            vllm_version=traits.vllm_version,
            contract_version=traits.contract_version,
            block_size=traits.block_size,
            tensor_parallel_size=traits.tensor_parallel_size,
            pipeline_parallel_size=traits.pipeline_parallel_size,
            data_parallel_size=traits.data_parallel_size,
            kv_connector=traits.kv_connector,
            kv_buffer_device=traits.kv_buffer_device,
            side_channel_host=traits.side_channel_host,
            side_channel_port=traits.side_channel_port,
            max_model_len=traits.max_model_len,
            num_kv_blocks=traits.num_kv_blocks,
            bidirectional_kv_xfer=traits.bidirectional_kv_xfer,
            decoder_kv_blocks_ttl=duration(traits.decoder_kv_blocks_ttl_us),
            kv_recompute_threshold=traits.kv_recompute_threshold,
            hybrid_kv_cache=traits.hybrid_kv_cache,
            lease_renewal=traits.lease_renewal,
            kv_cache_dtype=traits.kv_cache_dtype,
            nixl_version=traits.nixl_version,
            pin_lease=duration(traits.pin_lease_us),
            kv_block_bytes=traits.kv_block_bytes,
            prepared_legs=traits.prepared_legs,
        ),
        state=registry_pb2.Worker.State.Value(f"STATE_{worker.state.value}"),
    )


def entry_to_proto(record: WorkerRecord, retained: Retained) -> registry_pb2.WorkerEntry:
    """A worker with its lease and what its engine holds."""
    return registry_pb2.WorkerEntry(
        worker=worker_to_proto(record.worker),
        expire_time=timestamp(record.lease_expire_us),
        retained_conversations=retained.conversations,
        retained_blocks=retained.blocks,
    )


def change_to_proto(change: Change) -> registry_pb2.WatchWorkersResponse:
    """A change as its watcher gets it."""
    message = registry_pb2.WatchWorkersResponse(
        type=registry_pb2.WatchWorkersResponse.Type.Value(f"TYPE_{change.type.value}"),
        revision=change.revision,
    )
    if change.worker is not None:
        message.worker.CopyFrom(worker_to_proto(change.worker))
    return message


def duration(us: int) -> Duration:
    """Microseconds, not negative, as a Duration."""
    return Duration(seconds=us // MICROSECONDS, nanos=us % MICROSECONDS * 1000)


def timestamp(us: int) -> Timestamp:
    """Microseconds of the ledger's clock as a Timestamp."""
    return Timestamp(seconds=us // MICROSECONDS, nanos=us % MICROSECONDS * 1000)
