"""Compares the flags that count as given with those that one version's parser takes.

Run in a process of its own, with that version first on PYTHONPATH; prints "ok". The
parser is the version's own, with flags of ours.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from services.worker.given_flags import config_file, given_flags, with_config_apart


def main() -> None:
    """A flag is given exactly if the parser comes to another value than its default."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "vllm.yaml"
        file.write_text("block_size: 32\nenforce-eager: true\n")
        config = str(file)
        _agree(["--seed", "1"], set())
        _agree(["--block_size", "32"], {"block_size"})
        _agree(["--block-siz=32"], {"block_size"})
        _agree(["--enforce_eager"], {"enforce_eager"})
        _agree(["--kv_transfer_config.kv_role", "kv_both"], {"kv_transfer_config"})
        _agree(["--seed", "1", "--config", config], {"block_size", "enforce_eager"})
        _agree(["--config=" + config], {"block_size", "enforce_eager"})
        assert _parsed(["--config", config, "--block-size", "64"])["block_size"] == "64"
        assert _parsed(["--config=" + config])["block_size"] is None, "vLLM reads it by now"
    sys.stdout.write("ok\n")


def _agree(arguments: list[str], expected: set[str]) -> None:
    apart = with_config_apart(arguments)
    parsed = _parsed(apart)
    taken = {name for name in _FLAGS if parsed[name] is not None}
    keys = ["block_size", "enforce-eager"] if config_file(apart) else []
    given = given_flags(apart, keys)
    said = {name for name in _FLAGS if "--" + name.replace("_", "-") in given}
    assert taken == said == expected, (arguments, taken, said)


_FLAGS = ("block_size", "enforce_eager", "kv_transfer_config")


def _parsed(arguments: list[str]) -> dict[str, object]:
    """What the version's parser makes of a command line of the API server."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    for flag in ("--block-size", "--kv-transfer-config", "--seed", "--model", "--config"):
        parser.add_argument(flag)
    parser.add_argument("--enforce-eager", action="store_const", const=True)
    parsed: dict[str, object] = vars(parser.parse_args(["--model", "tiny", *arguments]))
    return parsed


if __name__ == "__main__":
    main()
