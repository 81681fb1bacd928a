"""What the registry is told about a worker. Pure functions."""

from __future__ import annotations

from kvloop.common.v1 import common_pb2
from kvloop.durations import to_duration
from kvloop.errors import PreconditionError
from kvloop.kvmeta.v1 import registry_pb2
from services.common.addresses import is_loopback, split_host_port
from services.worker.engine_command import Role
from services.worker.event_messages import Hello

_PROTO_ROLES: dict[Role, common_pb2.WorkerRole.ValueType] = {
    "prefill": common_pb2.WORKER_ROLE_PREFILL,
    "decode": common_pb2.WORKER_ROLE_DECODE,
}
_KV_ROLES: dict[Role, tuple[str, str]] = {
    "prefill": ("kv_producer", "kv_both"),
    "decode": ("kv_consumer", "kv_both"),
}


def worker_record(
    hello: Hello,
    *,
    role: Role,
    worker_id: str,
    address: str,
    model: str,
    prepared_legs: int,
) -> registry_pb2.Worker:
    """The worker as it registers.

    Args:
        hello: what the engine's connector said.
        role: leg that the worker runs.
        worker_id: stable name of the worker.
        address: host:port where routers reach the sidecar.
        model: served model name.
        prepared_legs: whose bodies the sidecar keeps at a time.
    """
    return registry_pb2.Worker(
        worker_id=worker_id,
        role=_PROTO_ROLES[role],
        address=address,
        model=model,
        engine=common_pb2.EngineRef(engine_id=hello.engine_id, epoch=hello.epoch),
        state=registry_pb2.Worker.STATE_ACTIVE,
        traits=registry_pb2.EngineTraits(
            vllm_version=hello.vllm_version,
            contract_version=hello.contract_version,
            block_size=hello.block_size,
            tensor_parallel_size=hello.tensor_parallel_size,
            pipeline_parallel_size=hello.pipeline_parallel_size,
            data_parallel_size=hello.data_parallel_size,
            kv_connector=hello.kv_connector,
            kv_buffer_device=hello.kv_buffer_device,
            side_channel_host=hello.side_channel_host,
            side_channel_port=hello.side_channel_port,
            max_model_len=hello.max_model_len,
            num_kv_blocks=hello.num_kv_blocks,
            bidirectional_kv_xfer=hello.bidirectional_kv_xfer,
            decoder_kv_blocks_ttl=to_duration(hello.decoder_kv_blocks_ttl),
            kv_recompute_threshold=hello.kv_recompute_threshold,
            hybrid_kv_cache=hello.hybrid_kv_cache,
            lease_renewal=hello.lease_renewal,
            kv_cache_dtype=hello.kv_cache_dtype,
            nixl_version=hello.nixl_version,
            pin_lease=to_duration(hello.pin_lease_seconds),
            kv_block_bytes=hello.kv_block_bytes,
            prepared_legs=prepared_legs,
        ),
    )


def check_role(hello: Hello, role: Role) -> None:
    """Refuse an engine that is set up for the other leg.

    Raises:
        PreconditionError: WRONG_ROLE.
    """
    if hello.kv_role not in _KV_ROLES[role]:
        raise PreconditionError(
            f"this is a {role} worker, but its engine runs with kv_role {hello.kv_role}; "
            f"start it with {_KV_ROLES[role][0]}",
            reason="WRONG_ROLE",
        )


def check_reachable(address: str, side_channel_host: str) -> None:
    """Refuse a side channel that no other host could reach.

    Raises:
        PreconditionError: LOOPBACK_SIDE_CHANNEL, the advertised address is not
            a loopback address and the side channel is.
    """
    host, _ = split_host_port(address)
    if is_loopback(side_channel_host) and not is_loopback(host):
        raise PreconditionError(
            f"the NIXL side channel listens on {side_channel_host}, but the worker is advertised "
            f"at {address}: no other host could pull its KV; set --side-channel-host to an "
            "address that the other workers can reach",
            reason="LOOPBACK_SIDE_CHANNEL",
            side_channel_host=side_channel_host,
            address=address,
        )
