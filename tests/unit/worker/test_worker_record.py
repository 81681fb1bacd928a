"""What the registry is told, and which engines are refused before."""

from __future__ import annotations

import pytest

from kvloop.common.v1 import common_pb2
from kvloop.errors import PreconditionError
from kvloop.kvmeta.v1 import registry_pb2
from services.worker.engine_command import Role
from services.worker.worker_record import check_reachable, check_role, worker_record
from tests.unit.worker.fakes import hello


def test_a_record_leaves_no_field_unset() -> None:
    record = worker_record(
        hello(hybrid_kv_cache=True, decoder_kv_blocks_ttl=480.5),
        role="decode",
        worker_id="decode-0",
        address="127.0.0.1:7400",
        model="tiny",
        prepared_legs=256,
    )
    assert record.role == common_pb2.WORKER_ROLE_DECODE
    assert record.engine == common_pb2.EngineRef(engine_id="engine-1", epoch="epoch-1")
    assert record.traits.decoder_kv_blocks_ttl.ToMilliseconds() == 480_500
    for message in (record, record.traits):
        unset = {field.name for field in message.DESCRIPTOR.fields} - {
            field.name for field, _ in message.ListFields()
        }
        assert unset == set()


def test_traits_are_what_the_connector_said() -> None:
    said = hello(block_size=128, tensor_parallel_size=2, side_channel_host="fd00::1")
    traits = worker_record(
        said, role="prefill", worker_id="p", address="h:1", model="m", prepared_legs=0
    ).traits
    assert (traits.block_size, traits.tensor_parallel_size) == (128, 2)
    assert traits.side_channel_host == "fd00::1"
    assert traits.vllm_version == "0.32.0"
    assert traits == registry_pb2.EngineTraits.FromString(traits.SerializeToString())


@pytest.mark.parametrize(
    ("kv_role", "role", "accepted"),
    [
        ("kv_producer", "prefill", True),
        ("kv_consumer", "decode", True),
        ("kv_both", "prefill", True),
        ("kv_both", "decode", True),
        ("kv_consumer", "prefill", False),
        ("kv_producer", "decode", False),
    ],
)
def test_an_engine_set_up_for_the_other_leg_is_refused(
    kv_role: str, role: Role, accepted: bool
) -> None:
    if accepted:
        check_role(hello(kv_role=kv_role), role)
        return
    with pytest.raises(PreconditionError, match=kv_role) as caught:
        check_role(hello(kv_role=kv_role), role)
    assert caught.value.reason == "WRONG_ROLE"


@pytest.mark.parametrize(
    ("address", "side_channel", "accepted"),
    [
        ("127.0.0.1:7400", "127.0.0.1", True),
        ("127.0.0.1:7400", "10.0.0.1", True),
        ("10.0.0.1:7400", "10.0.0.1", True),
        ("[fd00::1]:7400", "fd00::1", True),
        ("10.0.0.1:7400", "localhost", False),
        ("d0.example:7400", "127.0.0.1", False),
        ("[fd00::1]:7400", "::1", False),
    ],
)
def test_a_side_channel_that_no_other_host_can_reach_is_refused(
    address: str, side_channel: str, accepted: bool
) -> None:
    if accepted:
        check_reachable(address, side_channel)
        return
    with pytest.raises(PreconditionError, match="--side-channel-host") as caught:
        check_reachable(address, side_channel)
    assert caught.value.reason == "LOOPBACK_SIDE_CHANNEL"
