"""Answers read as stock vLLM has them, though kvloop's plugin has a part in them.

Decode streams get only the end of prompts, and bodies are parsed as they arrive.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tests.engine.world import MODEL, World

_SERVER = ["-m", "vllm.entrypoints.openai.api_server"]
_WHOSE_IS_IT = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
print(FastIncrementalDetokenizer.__init__.__module__)
from starlette.requests import Request
print(Request.json.__module__)
"""
_SPECIAL = 0


async def test_vllm_finds_the_plugin_where_an_engines_server_runs(world: World) -> None:
    """With the interpreter, environment and folder of the server itself."""
    server = _process(_SERVER, str(urlsplit(world.decode.url).port))
    environment = dict(
        entry.split("=", 1) for entry in _strings(server / "environ") if "=" in entry
    )
    started = await asyncio.create_subprocess_exec(
        _strings(server / "cmdline")[0],
        *("-c", _WHOSE_IS_IT),
        cwd=(server / "cwd").readlink(),
        env=environment,
        stdout=PIPE,
    )
    said, _ = await started.communicate()
    assert said.decode().splitlines()[-2:] == [
        "services.worker.engine_detokenizer",
        "services.worker.engine_front",
    ]


async def test_an_engines_server_parses_bodies_as_they_arrive(world: World) -> None:
    """Of both legs. It says so with the first."""
    await world.client.generate(world.tokens(50), model=MODEL, max_tokens=1).collect()
    log = world.stack.engine_log_path("decode-0")
    assert log is not None
    assert "kvloop: bodies of requests are parsed as they arrive" in log.read_text()


def _process(begin: list[str], argument: str) -> Path:
    """The one process that runs a Python module with an argument."""
    (found,) = [
        process
        for process in Path("/proc").glob("[0-9]*")
        if (argv := _strings(process / "cmdline"))[1:3] == begin and argument in argv
    ]
    return found


def _strings(path: Path) -> list[str]:
    """What the kernel tells of a process; nothing if it has gone."""
    try:
        return path.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(("count", "special"), [(600, 0), (600, 20), (10, 0)])
async def test_a_streamed_text_is_that_of_its_tokens(
    world: World, model_directory: Path, count: int, special: int, skip: bool
) -> None:
    """Tokens of all kinds, incomplete characters among them: so warm, the model knows no words."""
    prompt = world.tokens(count) + [_SPECIAL] * special
    done = await world.client.generate(
        prompt,
        model=MODEL,
        max_tokens=200,
        temperature=2.0,
        extra_body={
            "return_token_ids": True,
            "skip_special_tokens": skip,
            "ignore_eos": True,
            "seed": count + special,
        },
    ).collect()
    (choice,) = done.choices
    assert choice.token_ids is not None
    assert len(set(choice.token_ids)) > 100
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    stream = DecodeStream(ids=prompt, skip_special_tokens=skip)
    texts = [stream.step(tokenizer, token) or "" for token in choice.token_ids]
    assert choice.text == "".join(texts)
