"""What a local stack consists of."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One vLLM server with its sidecar.

    Attributes:
        role: leg that it runs.
        engine_args: extra flags for vLLM, shell-quoted, such as
            "--no-enable-prefix-caching --max-model-len 8192".
        args: extra flags for the sidecar.
        env: extra environment of the sidecar, and so of vLLM.
        decoder_kv_blocks_ttl_seconds: how long decode retains KV after a turn.
        kv_recompute_threshold: fewer tokens than this are recomputed.
    """

    role: Role
    engine_args: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    decoder_kv_blocks_ttl_seconds: int = 480
    kv_recompute_threshold: int = 64

    def __post_init__(self) -> None:
        shlex.split(self.engine_args)  # an open quote shall fail here, not in 80 s


def make_workers(
    prefill: int = 1,
    decode: int = 1,
    *,
    engine_args: str = "",
    prefill_engine_args: str = "",
    decode_engine_args: str = "",
    decoder_kv_blocks_ttl_seconds: int = 480,
    kv_recompute_threshold: int = 64,
) -> tuple[WorkerSettings, ...]:
    """Settings of N prefill and M decode workers that are alike within a role.

    Args:
        prefill: number of prefill workers, at least 1.
        decode: number of decode workers, at least 1.
        engine_args: extra vLLM flags of all workers.
        prefill_engine_args: further flags of prefill workers.
        decode_engine_args: further flags of decode workers.
        decoder_kv_blocks_ttl_seconds: of all workers.
        kv_recompute_threshold: of all workers.

    Raises:
        ValueError: a count is below 1, or flags have an open quote.
    """
    if prefill < 1 or decode < 1:
        raise ValueError("a stack needs at least one prefill and one decode worker")

    def worker(role: Role, role_args: str) -> WorkerSettings:
        return WorkerSettings(
            role=role,
            engine_args=f"{engine_args} {role_args}".strip(),
            decoder_kv_blocks_ttl_seconds=decoder_kv_blocks_ttl_seconds,
            kv_recompute_threshold=kv_recompute_threshold,
        )

    return (worker("prefill", prefill_engine_args),) * prefill + (
        worker("decode", decode_engine_args),
    ) * decode


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """A ledger, a router, and workers on this machine.

    Attributes:
        model: path of a model folder, or a hub name.
        served_model_name: name that clients use; by default the last part of
            `model`.
        workers: the workers; the n-th of a role, from 0, is named "role-n".
        run_dir: folder for logs, sockets and the ledger's database, kept at the
            end. By default a temporary one, removed after a clean end.
        keep_run_dir: keep a temporary run_dir too.
        env: extra environment of every process.
        kvmeta_args: extra flags for kvmeta.
        router_args: extra flags for the router.
        engine_python: Python that runs vLLM; by default the one running this.
        gpus: ids of the GPUs to spread the workers over, as CUDA_VISIBLE_DEVICES
            names them. Empty: vLLM decides.
        start_timeout_seconds: limit for one process to come up. Loading two
            engines on two cores takes 80 to 105 s.
        stop_timeout_seconds: time for one process to end by itself.
        tls: mutual TLS between all processes, and with their clients, with
            certificates made for this stack.
    """

    model: str
    served_model_name: str = ""
    workers: tuple[WorkerSettings, ...] = field(default_factory=make_workers)
    run_dir: Path | None = None
    keep_run_dir: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    kvmeta_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()
    engine_python: str = ""
    gpus: tuple[str, ...] = ()
    start_timeout_seconds: float = 300.0
    stop_timeout_seconds: float = 20.0
    tls: bool = False

    def __post_init__(self) -> None:
        if {worker.role for worker in self.workers} != {"prefill", "decode"}:
            raise ValueError("a stack needs at least one prefill and one decode worker")

    @property
    def model_name(self) -> str:
        """Name under which clients ask for the model."""
        return self.served_model_name or self.model.rstrip("/").rpartition("/")[2]
