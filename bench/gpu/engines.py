"""How the engines of each part are started."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.gpu.renewing import RENEW
from kvloop.stack import StackSettings, WorkerSettings
from services.worker.engine_command import Role
from services.worker.kv_layout import KvLayoutChoice, Platform

_COMPILATION = {
    "mode": 0,
    "cudagraph_mode": "FULL",
    "cudagraph_capture_sizes": [1, 2, 4, 8, *range(16, 257, 16), 512],
}
"""No torch.compile: it would cost minutes at each start. Sizes as vLLM's own, of which
those above 256 are left out: no part has steps of that size."""
_DECODE_GRAPHS = _COMPILATION | {"cudagraph_mode": "FULL_DECODE_ONLY"}
"""For latent attention, whose backends have graphs for decode steps alone."""
_COMMON = (
    *("--max-num-batched-tokens", "8192"),
    *("--max-num-seqs", "16"),
    *("--generation-config", "vllm"),
    "--no-enable-log-requests",
    # The KV cache's size is given; this only has to be free at the start.
    *("--gpu-memory-utilization", "0.1"),
)
_DUMMY = (
    *("--max-model-len", "65536"),
    *("--dtype", "bfloat16"),
    *("--load-format", "dummy"),
    *("--compilation-config", json.dumps(_COMPILATION)),
)
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # offers /reset_prefix_cache
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "4",
    "DO_NOT_TRACK": "1",
}

_TCP = {"UCX_TLS": "tcp,cuda_copy,self"}
"""What UCX falls back to where it sees no NVLink and may not use cuda_ipc."""


@dataclass(frozen=True)
class EnginePair:
    """One prefill and one decode engine.

    Attributes:
        name: for folders and output.
        model: model folder.
        engine_python: interpreter that has vLLM.
        args: vLLM's flags.
        prefill_args: further flags of prefill alone.
        kv_layout: the sidecar's --kv-layout.
        platform: build of vLLM that runs.
        decode_delay_seconds: decode starts that much later, for models whose loading
            takes more memory than they have in the end.
        env: environment of the engines.
        gpus: ids of the GPUs to spread the two over; empty for one GPU.
        pull_guard: whether pulls that would take longer than computing are held back.
            Off for models so small that computing anything is faster.
        traced: whether kvloop's services send spans of turns that ask for it.
        lease_seconds: the sidecars' --pin-lease-seconds.
        compared: whether answers are compared, for which last turns ask for token ids.
        bare: without any code of kvloop: vLLM's own connector, no plugins, and no services
            beside them.
    """

    name: str
    model: str
    engine_python: str
    args: tuple[str, ...]
    kv_layout: KvLayoutChoice
    prefill_args: tuple[str, ...] = ()
    platform: Platform = "cuda"
    decode_delay_seconds: float = 0.0
    env: Mapping[str, str] = field(default_factory=lambda: dict(_ENVIRONMENT))
    gpus: tuple[str, ...] = ()
    pull_guard: bool = True
    traced: bool = False
    lease_seconds: int = 60
    compared: bool = False
    bare: bool = False

    @property
    def model_name(self) -> str:
        """Served model name."""
        return Path(self.model).name

    def args_of(self, role: Role) -> list[str]:
        """vLLM's flags for one role."""
        return [*self.args, *(self.prefill_args if role == "prefill" else ())]

    def stack_settings(
        self, run_dir: Path, tracing: Mapping[str, str] | None = None
    ) -> StackSettings:
        """A kvloop stack with these engines.

        Args:
            run_dir: folder for logs and sockets.
            tracing: environment by which services send spans, for pairs that are traced.
        """
        delay = {"KVLOOP_GPU_START_DELAY_SECONDS": f"{self.decode_delay_seconds:g}"}
        return StackSettings(
            model=self.model,
            workers=tuple(
                WorkerSettings(
                    role=role,
                    engine_args=shlex.join(self.args_of(role)),
                    args=(
                        f"--platform={self.platform}",
                        f"--kv-layout={self.kv_layout}",
                        f"--pin-lease-seconds={self.lease_seconds}",
                        "--pull-guard" if self.pull_guard else "--no-pull-guard",
                    ),
                    env=delay if role == "decode" else {},
                )
                for role in ("prefill", "decode")
            ),
            run_dir=run_dir,
            env={**self.env, **((tracing or {}) if self.traced else {})},
            engine_python=self.engine_python,
            gpus=self.gpus,
            start_timeout_seconds=330.0,
        )


def engine_pairs() -> dict[str, EnginePair]:
    """All pairs, by name."""
    work = Path(os.environ.get("KVLOOP_GPU_DIR", ""))
    python = str(work / "engine-python")

    def pair(
        name: str, model: str, args: tuple[str, ...], layout: KvLayoutChoice = "auto"
    ) -> EnginePair:
        folder = str(work / "models" / model)
        return EnginePair(name, folder, python, (*_COMMON, *args), layout)

    def kv(gib: int) -> tuple[str, str]:
        return "--kv-cache-memory-bytes", f"{gib}G"

    tiny = ("--enforce-eager", "--max-model-len", "16384", *kv(2))
    float32 = ("--dtype", "float32", "--attention-backend", "TRITON_ATTN")
    q8_args = (*_DUMMY, *kv(12))
    # Decode retains three histories of 33k tokens at once, two of them under kvloop's pins,
    # which may take half of its blocks. Prefill needs one prompt of the longest length.
    q8 = replace(_cold(pair("q8", "q8", (*_DUMMY, *kv(22)))), traced=True)
    q8 = replace(q8, prefill_args=(*q8.prefill_args, *kv(10)))
    q8_bare = replace(q8, name="q8-bare", bare=True, traced=False)
    q8_stock = replace(q8_bare, name="q8-stock", args=(*q8.args, "--block-size", "16"))
    q32 = pair("q32", "q32", (*_DUMMY, "--quantization", "fp8", *kv(21)))
    latent = ("--compilation-config", json.dumps(_DECODE_GRAPHS))
    a3b = pair("a3b", "a3b", (*_DUMMY, "--quantization", "fp8", *kv(8)))
    # The same: three histories of 41k tokens.
    two_gpus = replace(
        pair("q32-two-gpus", "q32", (*_DUMMY, *kv(52))), gpus=("0", "1"), traced=True
    )
    exact = replace(
        _cold(pair("tiny-float32", "tiny", (*tiny, *float32))),
        pull_guard=False,
        lease_seconds=20,
        compared=True,
        env=_ENVIRONMENT | {RENEW: "1"},
    )
    pairs = [
        exact,
        replace(
            pair("tiny-bfloat16", "tiny", (*tiny, "--dtype", "bfloat16")),
            pull_guard=False,
            compared=True,
        ),
        q8,
        q8_bare,
        q8_stock,
        replace(_cold(pair("q8-tcp", "q8", q8_args)), env=_ENVIRONMENT | _TCP),
        _cold(pair("q8-block-128", "q8", q8_args, "large-blocks")),
        _cold(pair("q8-engine-default", "q8", q8_args, "engine-default")),
        replace(q32, decode_delay_seconds=40.0),
        replace(_cold(pair("v2lite", "v2lite", (*_DUMMY, *latent, *kv(6)))), compared=True),
        replace(_cold(a3b), decode_delay_seconds=40.0, compared=True),
        two_gpus,
        replace(_cold(two_gpus), name="q32-two-gpus-cold"),
    ]
    return {made.name: made for made in pairs}


def rehearsal_pairs(model: str) -> dict[str, EnginePair]:
    """The same names on vLLM's CPU build with a tiny model: tries the scripts out.

    Without those of the bare protocol: four engines at once are too many for few cores.
    """
    args = ("--max-model-len", "8192", "--generation-config", "vllm", "--no-enable-log-requests")
    made = {
        name: EnginePair(
            name,
            model,
            sys.executable,
            args,
            pair.kv_layout,
            platform="cpu",
            # Threads of two engines that wait for each other on few cores take seconds a step.
            env=_ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
            pull_guard=pair.pull_guard,
            traced=pair.traced,
            lease_seconds=pair.lease_seconds,
            compared=pair.compared,
        )
        for name, pair in engine_pairs().items()
        if not pair.bare
    }
    return {
        name: pair if name in ("tiny-bfloat16", "q32") else _cold(pair)
        for name, pair in made.items()
    }


def _cold(pair: EnginePair) -> EnginePair:
    """The pair with a prefill engine that never finds a prefix, as one of many does."""
    return replace(pair, prefill_args=("--no-enable-prefix-caching",))
