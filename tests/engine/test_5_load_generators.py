"""Load generators that people use, unmodified, through the gateway to real engines."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.turns import keep_conversations
from tests.engine.world import MODEL, World

AIPERF = os.environ.get("KVLOOP_AIPERF", "")
"""The program; CI installs it (`.ci/aiperf`)."""
TURNS = 3
# What `vllm bench serve` runs. The dispatcher in front of it asks for the metadata of
# a package that the CPU build calls by another name.
_VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


async def _run(*command: str, cwd: Path) -> str:
    """Run a program to its end; what it printed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, printed.decode()[-3000:]
    return printed.decode()


async def _vllm_bench(world: World, model_directory: Path, folder: Path, *more: str) -> Any:
    """Results of `vllm bench serve` over two prompts."""
    result = folder / "result.json"
    await _run(
        *(sys.executable, "-c", _VLLM_BENCH),
        *("--base-url", world.stack.gateway_url, "--model", MODEL),
        *("--tokenizer", str(model_directory), "--dataset-name", "random"),
        *("--random-input-len", "600", "--random-output-len", "20", "--num-prompts", "2"),
        *("--max-concurrency", "1", "--temperature", "0", "--seed", "7", "--disable-tqdm"),
        *("--save-result", "--result-filename", str(result), *more),
        cwd=folder,
    )
    return json.loads(result.read_text())


async def test_vllm_bench_serve_pulls_prompts_that_it_sent_before(
    world: World, model_directory: Path, tmp_path: Path
) -> None:
    backend = ("--backend", "openai", "--endpoint", "/v1/completions")
    first = await _vllm_bench(world, model_directory, tmp_path, *backend)
    assert (first["completed"], first["failed"]) == (2, 0)
    await keep_conversations(world)  # the program takes long to start
    await world.prefill.forget_prefixes()
    before = await world.prefill.pulled_tokens()
    again = await _vllm_bench(world, model_directory, tmp_path, *backend)
    assert (again["completed"], again["failed"]) == (2, 0)
    assert await world.prefill.pulled_tokens() - before > 1000


async def test_vllm_bench_serve_runs_over_chats(
    world: World, model_directory: Path, tmp_path: Path
) -> None:
    backend = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")
    done = await _vllm_bench(world, model_directory, tmp_path, *backend)
    assert (done["completed"], done["failed"]) == (2, 0)
    assert done["total_output_tokens"] == 40


@pytest.mark.skipif(not AIPERF, reason="KVLOOP_AIPERF names no program")
async def test_aiperf_pulls_the_answers_of_its_conversations(
    world: World, model_directory: Path, tmp_path: Path
) -> None:
    """No ids are sent: conversations are known by the history that aiperf puts together."""
    sessions = [
        {"session_id": f"s{i}", "turns": [{"text": world.words(150)} for _ in range(TURNS)]}
        for i in range(2)
    ]
    dataset = tmp_path / "conversations.jsonl"
    dataset.write_text("\n".join(map(json.dumps, sessions)))
    before = await world.prefill.pulled_tokens()
    await _run(
        *(AIPERF, "profile", "--ui", "none", "--model", MODEL, "--url", world.stack.gateway_url),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", str(model_directory)),
        *("--input-file", str(dataset), "--custom-dataset-type", "multi_turn"),
        *("--conversation-num", "2", "--concurrency", "1"),
        *("--extra-inputs", "max_tokens:100", "--extra-inputs", "temperature:0"),
        *("--output-artifact-dir", str(tmp_path / "out")),
        cwd=tmp_path,
    )
    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 2 * TURNS
    assert not report.get("error_request_count")
    # P keeps the prompts itself; of every turn but the last it lacks the answer.
    assert await world.prefill.pulled_tokens() - before >= 2 * (TURNS - 1) * 90
