"""Starts vLLM as settings say."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from glob import glob
from pathlib import Path
from typing import Any, Literal

import structlog

import services
from services.worker.engine_command import (
    OWNED_FLAGS,
    EngineCommand,
    EngineOptions,
    engine_command,
)
from services.worker.engine_process import EngineProcess, start_engine
from services.worker.given_flags import GivenFlags, config_file, given_flags
from services.worker.kv_layout import (
    KvLayout,
    Platform,
    attention_of,
    choose_kv_layout,
    vllm_version,
)
from services.worker.settings import WorkerSettings
from services.worker.transport import transport_warnings

_log = structlog.get_logger(__name__)

_SITE_DIRECTORIES = ("site-packages", "dist-packages")
_METADATA = "kvloop-*.dist-info"
"""Where an installation keeps its entry points."""
_PROBE_SECONDS = 10.0


def has_nvidia_gpu() -> bool:
    """True if this machine has an NVIDIA GPU that its driver can see."""
    if count_gpus():
        return True
    try:  # no device files under WSL
        found = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, timeout=_PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0 and b"GPU 0" in found.stdout


def count_gpus() -> int:
    """NVIDIA GPUs with device files on this machine."""
    return len(glob("/dev/nvidia[0-9]*"))


def choose_platform(
    setting: Literal["auto", "cpu", "cuda"], gpu_present: Callable[[], bool]
) -> Platform:
    """The build of vLLM to run: what settings say, or what the machine has."""
    if setting != "auto":
        return setting
    return "cuda" if gpu_present() else "cpu"


@contextmanager
def import_root(engine_python: str) -> Iterator[Path]:
    """A directory from which that interpreter can import our connector.

    If kvloop is installed among the packages of another environment than the
    engine's, that whole directory must not get onto the engine's path, where it
    would replace packages of its own: a directory with links to our services, and to
    what tells vLLM of our plugin, does.
    """
    package = Path(services.__path__[0]).resolve()
    if package.parent.name not in _SITE_DIRECTORIES or engine_python == sys.executable:
        yield package.parent
        return
    with tempfile.TemporaryDirectory(prefix="kvloop-") as directory:
        for found in (package, *package.parent.glob(_METADATA)):
            (Path(directory) / found.name).symlink_to(found)
        yield Path(directory)


@asynccontextmanager
async def launch(
    settings: WorkerSettings, gpu_present: Callable[[], bool] = has_nvidia_gpu
) -> AsyncIterator[EngineProcess]:
    """Run vLLM while the block runs.

    Args:
        settings: must name a model.
        gpu_present: whether the machine has an NVIDIA GPU.
    """
    platform = choose_platform(settings.platform, gpu_present)
    with import_root(settings.engine_python) as root:
        command, layout = await asyncio.to_thread(command_for, settings, platform, root)
        environment = command.environment(os.environ)
        _log.info(
            "engine_starting",
            model=settings.model,
            role=settings.role,
            platform=platform,
            block_size=layout.block_size,
            cross_layers=layout.cross_layers,
            kv_layout_reason=layout.reason,
            ucx={n: v for n, v in environment.items() if n.startswith("UCX_")},
            log=str(settings.engine_log),
        )
        warnings = list(layout.warnings)
        if platform == "cuda":
            warnings += transport_warnings(environment, count_gpus())
        for warning in warnings:
            _log.warning("engine_setting_slows_pulls", what=warning)
        async with start_engine(
            command.argv,
            environment,
            settings.engine_log,
            stop_grace_seconds=settings.engine_stop_grace_seconds,
        ) as process:
            yield process


def command_for(
    settings: WorkerSettings, platform: Platform, root: Path
) -> tuple[EngineCommand, KvLayout]:
    """The command that starts vLLM as settings say, and the KV layout in it.

    It may ask the engine's interpreter for vLLM's version, which takes a while.

    Args:
        settings: must name a model.
        platform: build of vLLM.
        root: from where the engine can import our connector.
    """
    given = _given(settings)
    layout = _kv_layout(settings, platform, given)
    return engine_command(_options(settings, platform, layout, given, root)), layout


def installed_vllm(engine_python: str) -> str | None:
    """Version of vLLM that an interpreter has; None if it cannot be told."""
    script = "from importlib.metadata import version; print(version('vllm'))"
    return _ask(engine_python, script) or None


def config_keys(engine_python: str, file: str) -> list[str] | None:
    """Names of the flags in a file for vLLM's --config; None if it cannot be read.

    The engine's interpreter reads it, since vLLM brings a reader of YAML.
    """
    script = "import json, sys, yaml; print(json.dumps([*yaml.safe_load(open(sys.argv[1]))]))"
    try:
        keys = json.loads(_ask(engine_python, script, file))
    except ValueError:
        return None
    return [str(key) for key in keys]


def _ask(engine_python: str, script: str, *arguments: str) -> str:
    """What a script prints in the engine's interpreter; empty if it cannot run."""
    try:
        told = subprocess.run(
            [engine_python, "-c", script, *arguments],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.strip()


def read_model_config(model: str | None) -> dict[str, Any]:
    """config.json of a model folder; empty for a hub name or an unreadable file."""
    try:
        config = json.loads((Path(model or "") / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _given(settings: WorkerSettings) -> GivenFlags:
    """The operator's flags for vLLM, those in a file included."""
    arguments = settings.extra_engine_args
    file = config_file(arguments)
    if file is None:
        return given_flags(arguments)
    keys = config_keys(settings.engine_python, file)
    if keys is None:
        _log.warning("engine_config_unreadable", file=file)
    given = given_flags(arguments, keys or ())
    # None of them is on the command line: settings refuse that.
    if overridden := [flag for flag in OWNED_FLAGS if flag in given]:
        _log.warning("engine_config_overridden", file=file, flags=overridden)
    return given


def _kv_layout(settings: WorkerSettings, platform: Platform, given: GivenFlags) -> KvLayout:
    known = platform == "cuda" and settings.kv_layout in ("auto", "cross-layers")
    return choose_kv_layout(
        settings.kv_layout,
        platform=platform,
        version=vllm_version(installed_vllm(settings.engine_python)) if known else None,
        block_size=settings.block_size,
        flags=given,
        environment=os.environ,
        attention=attention_of(read_model_config(settings.model)),
    )


def _options(
    settings: WorkerSettings,
    platform: Platform,
    layout: KvLayout,
    given: GivenFlags,
    root: Path,
) -> EngineOptions:
    if settings.model is None or settings.model_name is None:
        raise ValueError("there is no model to start vLLM with")
    return EngineOptions(
        role=settings.role,
        platform=platform,
        python=settings.engine_python,
        model=settings.model,
        model_is_local=os.path.isdir(settings.model),
        served_model_name=settings.model_name,
        port=settings.engine_port,
        side_channel_host=settings.side_channel_host,
        side_channel_port=settings.side_channel_port,
        events_socket=settings.events_socket.absolute(),
        import_root=root,
        kv_recompute_threshold=settings.kv_recompute_threshold,
        decoder_kv_blocks_ttl_seconds=settings.decoder_kv_blocks_ttl_seconds,
        pin_lease_seconds=settings.pin_lease_seconds,
        kv_layout=layout,
        cpu_kv_cache_gib=settings.cpu_kv_cache_gib,
        cpu_threads=settings.cpu_threads,
        extra_args=settings.extra_engine_args,
        given=given,
        nixl_backends=settings.nixl_backend_names,
    )
