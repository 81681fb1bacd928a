"""What in an engine's environment makes pulls slow without an error. Pure functions.

UCX takes the next best transport where it may not use, or does not see, the best one:
0.3 to 0.4 GB/s over TCP in place of 60 to 350 over NVLink.
"""

from __future__ import annotations

from collections.abc import Mapping

GET_ZCOPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
"""Lets UCX read another process's GPU memory where it sees no NVLink."""
_TLS = "UCX_TLS"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OFF = ("n", "no", "0", "off", "false")
_REACH_GPUS = {"all", "cuda", "gpu", "cuda_ipc"}
_NETWORKS = ("rc", "dc", "ib", "ud", "srd")


def transport_warnings(environment: Mapping[str, str], gpus: int) -> list[str]:
    """What holds pulls back, and what to set instead.

    Args:
        environment: of the engine.
        gpus: GPUs that the machine has.
    """
    found = []
    if environment.get(GET_ZCOPY, "y").lower() in _OFF:
        found.append(
            f"{GET_ZCOPY} is off: where UCX sees no NVLink, pulls fall back to TCP; set it to y"
        )
    if (transports := environment.get(_TLS)) and not _reaches_gpus(transports):
        found.append(
            f"{_TLS}={transports} has no transport between GPUs: pulls on one host go over TCP; "
            "add cuda_ipc, or leave it unset"
        )
    if gpus > 1 and _names_one(environment.get(_VISIBLE, "")):
        found.append(
            f"{_VISIBLE} shows the engine one of {gpus} GPUs: cuda_ipc cannot reach the GPU of "
            "the other engine on this host; list its own GPU first and then the others"
        )
    return found


def _reaches_gpus(transports: str) -> bool:
    """True if the list has a way from GPU memory to GPU memory, here or over RDMA."""
    names = {name.strip() for name in transports.removeprefix("^").split(",")}
    if transports.startswith("^"):
        return not names & _REACH_GPUS
    return bool(names & _REACH_GPUS) or any(name.startswith(_NETWORKS) for name in names)


def _names_one(visible: str) -> bool:
    return len([name for name in visible.split(",") if name.strip()]) == 1
