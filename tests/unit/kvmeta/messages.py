"""Requests that are accepted as they are, for tests to spoil."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2

PARAMS = b'{"remote_block_ids":[[1,2]],"remote_blocks_expiry_time":12.50,"new":null}'


def seconds(value: float) -> Duration:
    whole = int(value)
    return Duration(seconds=whole, nanos=round((value - whole) * 1e9))


def conversation(name: str = "c", tenant: str = "t") -> common_pb2.ConversationKey:
    return common_pb2.ConversationKey(tenant=tenant, model="m", conversation_id=name)


def take(name: str = "c", request_id: str = "r2", tenant: str = "t"):
    return ledger_pb2.TakeHandleRequest(key=conversation(name, tenant), request_id=request_id)


def commit(name: str = "c", request_id: str = "r1", turn: int = 0, tenant: str = "t"):
    return ledger_pb2.CommitTurnRequest(
        key=conversation(name, tenant),
        request_id=request_id,
        turn=turn,
        worker_id="d1",
        engine=engine(),
        transfer_params_json=PARAMS,
        engine_ttl=seconds(480),
        num_tokens=64,
        num_blocks=2,
    )


def engine(epoch: str = "epoch-1") -> common_pb2.EngineRef:
    return common_pb2.EngineRef(engine_id="engine-1", epoch=epoch)


def worker(worker_id: str = "d1", epoch: str = "epoch-1") -> registry_pb2.Worker:
    return registry_pb2.Worker(
        worker_id=worker_id,
        role=common_pb2.WORKER_ROLE_DECODE,
        address="127.0.0.1:7400",
        model="m",
        engine=engine(epoch),
        traits=registry_pb2.EngineTraits(
            vllm_version="0.32.0",
            contract_version=1,
            block_size=32,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            kv_connector="KvloopConnector",
            kv_buffer_device="cpu",
            side_channel_host="127.0.0.1",
            side_channel_port=5700,
            max_model_len=4096,
            num_kv_blocks=1000,
            bidirectional_kv_xfer=True,
            decoder_kv_blocks_ttl=seconds(480),
            kv_recompute_threshold=64,
            lease_renewal=True,
            kv_cache_dtype="auto",
            nixl_version="1.5.1",
            pin_lease=seconds(0),
            kv_block_bytes=4096,
        ),
    )


def register(worker_id: str = "d1", epoch: str = "epoch-1", ttl: float = 15):
    return registry_pb2.RegisterWorkerRequest(worker=worker(worker_id, epoch), ttl=seconds(ttl))
