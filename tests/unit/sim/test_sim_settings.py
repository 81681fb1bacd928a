"""Settings: what follows from what, and what is refused before anything starts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from services.sim.latency import PROFILES, Preset
from services.sim.settings import SimSettings
from services.sim.spec import KvRole


def _flags(*arguments: str) -> SimSettings:
    return CliApp.run(SimSettings, cli_args=list(arguments))


def test_ports_count_up_from_the_roles_default() -> None:
    specs = list(_flags("--role", "decode", "--engines", "3").specs())
    assert [spec.port for spec in specs] == [8200, 8201, 8202]
    assert [spec.side_channel_port for spec in specs] == [5700, 5701, 5702]
    assert {spec.kv_role for spec in specs} == {KvRole.CONSUMER}


def test_port_zero_stays_zero_for_all() -> None:
    assert [spec.port for spec in _flags("--engines", "2", "--port", "0").specs()] == [0, 0]


@pytest.mark.parametrize("preset", list(Preset))
def test_every_preset_can_be_chosen(preset: Preset) -> None:
    assert _flags("--preset", preset).profile == PROFILES[preset]


def test_the_preset_decides_how_many_blocks_there_are() -> None:
    settings = _flags("--preset", "qwen3-32b-h200", "--block-size", "128")
    assert settings.blocks == 163_840 // 128 + 1
    assert _flags("--num-kv-blocks", "4000").blocks == 4000


def test_flags_override_single_figures_of_the_preset() -> None:
    profile = _flags(
        "--preset=qwen3-32b-h200",
        "--prefill-tokens-per-second=1000",
        "--transfer-gigabytes-per-second=2",
        "--descriptors-per-block=1",
        "--inter-token-seconds=0.02",
    ).profile
    assert profile.prefill_token_seconds == 0.001
    assert profile.bytes_per_second == 2e9
    assert profile.descriptors_per_block == 1
    assert profile.step_seconds == 0.02
    assert profile.descriptor_seconds == PROFILES[Preset.QWEN3_32B_H200].descriptor_seconds


@pytest.mark.parametrize(
    ("version", "streams", "renews"),
    [("0.21", False, False), ("0.32.0", False, True), ("0.33.1", True, True)],
)
def test_the_version_decides_what_the_engine_can_do(
    version: str, streams: bool, renews: bool
) -> None:
    (spec,) = _flags("--vllm-version", version).specs()
    assert (spec.params_in_streams, spec.renews_leases) == (streams, renews)
    assert spec.version_text == version


def test_each_engine_has_its_own_sidecar_and_name() -> None:
    settings = _flags("--engines=2", "--events-socket=/tmp/e{index}.sock", "--engine-id=d{index}")
    assert [settings.events_socket_of(index) for index in (0, 1)] == [
        "/tmp/e0.sock",
        "/tmp/e1.sock",
    ]
    assert [spec.engine_id for spec in settings.specs()] == ["d0", "d1"]


def test_the_event_socket_is_found_where_vllms_connector_finds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVLOOP_EVENTS_SOCKET", "/tmp/events.sock")
    assert _flags().events_socket == "/tmp/events.sock"


def test_faults_can_be_given_several_times() -> None:
    settings = _flags("--fault", "hang;count=1", "--fault", "drop;leg=decode")
    assert [str(fault.kind) for fault in settings.faults] == ["hang", "drop"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--num-kv-blocks=10"],
        ["--engines=2", "--events-socket=/tmp/e.sock"],
        ["--engines=2", "--engine-id=same"],
        ["--engines=10", "--port=65530"],
        ["--fault=explode"],
        ["--vllm-version=new"],
        ["--admin-listen=8300"],
        ["--time-scale=-1"],
    ],
)
def test_settings_that_cannot_work_are_refused(flags: list[str]) -> None:
    with pytest.raises(ValidationError):
        _flags(*flags)
