"""Settings of a process of simulated engines: environment KVLOOP_SIM_*, flags on top."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from services.common.addresses import split_host_port
from services.sim.blocks import FreedReads
from services.sim.faults import Fault, parse
from services.sim.latency import PROFILES, Preset, Profile
from services.sim.spec import EngineSpec, KvRole, LoadFailurePolicy

_KV_ROLES = {
    "prefill": KvRole.PRODUCER,
    "decode": KvRole.CONSUMER,
    "both": KvRole.BOTH,
}


def _default_port(fields: dict[str, Any]) -> int:
    return 8200 if fields["role"] == "decode" else 8100


def _default_side_channel_port(fields: dict[str, Any]) -> int:
    return 5700 if fields["role"] == "decode" else 5600


def _events_socket_of_connector() -> str | None:
    return os.environ.get("KVLOOP_EVENTS_SOCKET") or None


class SimSettings(BaseSettings):
    """Simulated vLLM servers: the HTTP surface, KV cache and transfers, no model.

    One process hosts one engine or hundreds. Engine number i, from 0, listens on
    --port + i and has its side channel on --side-channel-port + i. In
    --events-socket and --engine-id, {index} stands for i. Every flag is also an
    environment variable: --time-scale is KVLOOP_SIM_TIME_SCALE.
    """

    model_config = SettingsConfigDict(
        env_prefix="KVLOOP_SIM_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_prog_name="python -m services.sim",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    role: Literal["prefill", "decode", "both"] = "prefill"
    """Leg that the engines run."""
    engines: PositiveInt = 1
    """Engines in this process."""
    host: str = "127.0.0.1"
    """Address of the HTTP servers."""
    port: int = Field(default_factory=_default_port, ge=0, le=65535)
    """HTTP port of the first engine: 8100, for decode 8200. 0 takes free ones."""
    side_channel_host: str = "127.0.0.1"
    """Address of the side channels. It must be one that other engines can reach."""
    side_channel_port: int = Field(default_factory=_default_side_channel_port, ge=0, le=65535)
    """Side channel port of the first engine: 5600, for decode 5700. 0 takes free ones."""
    events_socket: str | None = Field(default_factory=_events_socket_of_connector)
    """Unix socket of the sidecar; KVLOOP_EVENTS_SOCKET, as for vLLM, if omitted."""
    admin_listen: str | None = None
    """host:port where engines that are down can be started again; none if omitted."""

    served_model_name: str = "sim-model"
    """Model name. Engines with the same name compute the same KV."""
    max_model_len: PositiveInt = 32_768
    """Tokens that prompt and answer may have together."""
    answer_tokens: NonNegativeInt = 64
    """Mean length of answers that end by themselves; 0: none does."""
    enable_prompt_tokens_details: bool = False
    """Tell cached tokens in usage, as vLLM does with the flag of that name."""
    vllm_version: str = Field("0.32.0", pattern=r"^\d+\.\d+(\.\d+)?$")
    """Version to behave as: from 0.22 prefill's blocks are kept alive on heartbeats,
    from 0.29 decode's by renewals, from 0.33 streams carry transfer params."""

    block_size: PositiveInt = 16
    """Tokens per KV block."""
    num_kv_blocks: PositiveInt | None = None
    """KV blocks per engine; by default what the preset's machine holds."""
    max_num_seqs: PositiveInt = 256
    """Requests that run at once; more wait."""
    max_num_batched_tokens: PositiveInt = 8192
    """Tokens computed in one step."""
    freed_blocks_read: Literal["noise", "stale"] = "noise"
    """What a read of blocks that are in nobody's use gives."""

    stock: bool = False
    """Behave as stock NixlConnector: nothing is proven, no events are sent."""
    bidirectional_kv_xfer: bool = True
    """Decode keeps blocks for the next turn."""
    kv_recompute_threshold: NonNegativeInt = 64
    """Tokens below which prefill recomputes instead of pulling."""
    decoder_kv_blocks_ttl_seconds: PositiveFloat = 480
    """How long decode keeps a finished turn's blocks."""
    pin_lease_seconds: PositiveFloat = 60
    """How long it keeps them unless the sidecar renews their lease: kvloop_pin_lease."""
    kv_lease_duration_seconds: PositiveFloat = 30
    """How long prefill keeps blocks that decode has not read."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request whose pull fails."""
    engine_id: str | None = None
    """Engine id; by default each life of an engine has its own."""

    preset: Literal["instant", "tiny-cpu", "qwen3-32b-h200", "qwen3-32b-h200-slow-link"] = "instant"
    """How fast the engines are."""
    time_scale: NonNegativeFloat = 1.0
    """Simulated durations are multiplied by this: 0.1 is ten times faster."""
    prefill_tokens_per_second: PositiveFloat | None = None
    """Overrides the preset: prompt tokens computed per second, attention aside."""
    inter_token_seconds: NonNegativeFloat | None = None
    """Overrides the preset: the shortest step."""
    transfer_gigabytes_per_second: PositiveFloat | None = None
    """Overrides the preset: bandwidth between engines."""
    descriptors_per_block: PositiveInt | None = None
    """Overrides the preset: descriptors of a transfer per block; 1 stands for
    cross-layer blocks."""

    fault: Annotated[list[str], NoDecode] = []
    """A fault that stands from the start, as in "die;after_tokens=3;leg=decode".
    May be repeated."""
    seed: int = 0
    """Decides which requests meet a fault that has a probability."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""
    log_json: bool = False
    """Log JSON lines instead of text."""

    @field_validator("fault", mode="before")
    @classmethod
    def _split_faults(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("fault")
    @classmethod
    def _are_faults(cls, value: list[str]) -> list[str]:
        for text in value:
            parse(text)
        return value

    @field_validator("admin_listen")
    @classmethod
    def _is_host_port(cls, value: str | None) -> str | None:
        if value is not None:
            split_host_port(value)
        return value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name, port in (("port", self.port), ("side_channel_port", self.side_channel_port)):
            if port and port + self.engines - 1 > 65535:
                raise ValueError(f"{name} + engines is above 65535")
        if (self.blocks - 1) * self.block_size < self.max_model_len:
            raise ValueError(
                f"{self.blocks} blocks of {self.block_size} tokens do not hold one request of "
                f"max_model_len {self.max_model_len}: raise num_kv_blocks or lower max_model_len"
            )
        if self.engines > 1:
            for name in ("events_socket", "engine_id"):
                value = getattr(self, name)
                if value is not None and "{index}" not in value:
                    raise ValueError(f"{name} needs {{index}} in it: there are several engines")
        return self

    @property
    def blocks(self) -> int:
        """KV blocks per engine."""
        if self.num_kv_blocks is not None:
            return self.num_kv_blocks
        return math.ceil(PROFILES[Preset(self.preset)].kv_capacity_tokens / self.block_size) + 1

    @property
    def faults(self) -> list[Fault]:
        """Faults that stand from the start."""
        return [fault for text in self.fault for fault in parse(text)]

    @property
    def profile(self) -> Profile:
        """The preset with what overrides it."""
        changes: dict[str, Any] = {}
        if self.prefill_tokens_per_second is not None:
            changes["prefill_token_seconds"] = 1 / self.prefill_tokens_per_second
        if self.inter_token_seconds is not None:
            changes["step_seconds"] = self.inter_token_seconds
        if self.transfer_gigabytes_per_second is not None:
            changes["bytes_per_second"] = self.transfer_gigabytes_per_second * 1e9
        if self.descriptors_per_block is not None:
            changes["descriptors_per_block"] = self.descriptors_per_block
        return replace(PROFILES[Preset(self.preset)], **changes)

    def specs(self) -> Iterator[EngineSpec]:
        """What each engine of the process is."""
        for index in range(self.engines):
            yield EngineSpec(
                index=index,
                kv_role=_KV_ROLES[self.role],
                model=self.served_model_name,
                host=self.host,
                port=self.port and self.port + index,
                side_channel_host=self.side_channel_host,
                side_channel_port=self.side_channel_port and self.side_channel_port + index,
                max_model_len=self.max_model_len,
                block_size=self.block_size,
                num_blocks=self.blocks,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                answer_tokens=self.answer_tokens,
                profile=self.profile,
                time_scale=self.time_scale,
                has_sidecar=self.events_socket is not None,
                stock=self.stock,
                bidirectional=self.bidirectional_kv_xfer,
                kv_recompute_threshold=self.kv_recompute_threshold,
                decoder_kv_blocks_ttl_seconds=self.decoder_kv_blocks_ttl_seconds,
                pin_lease_seconds=self.pin_lease_seconds,
                kv_lease_seconds=self.kv_lease_duration_seconds,
                load_failure_policy=LoadFailurePolicy(self.kv_load_failure_policy),
                freed_reads=FreedReads(self.freed_blocks_read),
                vllm_version=tuple(int(part) for part in self.vllm_version.split(".")),
                prompt_tokens_details=self.enable_prompt_tokens_details,
                engine_id=_numbered(self.engine_id, index),
            )

    def events_socket_of(self, index: int) -> str | None:
        """Where the sidecar of an engine listens."""
        return _numbered(self.events_socket, index)


def _numbered(template: str | None, index: int) -> str | None:
    return template.replace("{index}", str(index)) if template is not None else None
