"""Settings that make pulls slow without an error."""

from __future__ import annotations

import pytest

from services.worker.transport import transport_warnings


@pytest.mark.parametrize(
    ("environment", "gpus", "said"),
    [
        ({"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "n"}, 1, "fall back to TCP"),
        ({"UCX_TLS": "tcp,cuda_copy,self"}, 1, "add cuda_ipc"),
        ({"UCX_TLS": "^cuda_ipc"}, 1, "no transport between GPUs"),
        ({"UCX_TLS": "^cuda"}, 1, "no transport between GPUs"),
        ({"UCX_TLS": "^ugni, gpu"}, 1, "no transport between GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "3"}, 8, "one of 8 GPUs"),
    ],
)
def test_what_holds_pulls_back_is_named(environment: dict[str, str], gpus: int, said: str) -> None:
    (warning,) = transport_warnings(environment, gpus)
    assert said in warning


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, 8),
        ({"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y", "UCX_TLS": "all"}, 2),
        ({"UCX_TLS": "cuda_ipc,cuda_copy,tcp"}, 2),
        ({"UCX_TLS": "rc,cuda_copy"}, 2),
        ({"UCX_TLS": "^ugni"}, 2),
        ({"UCX_TLS": "^cuda_copy"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1),
    ],
)
def test_nothing_is_said_of_what_does_no_harm(environment: dict[str, str], gpus: int) -> None:
    assert transport_warnings(environment, gpus) == []
