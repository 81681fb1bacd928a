"""Which of vLLM's flags an operator has given. Pure functions.

vLLM's parser takes --block_size for --block-size and --block-siz for either, a part of a
JSON flag (--kv-transfer-config.kv_role), and --no- before a switch. A file that --config
names gives flags, too. vLLM puts them first, so those of the command line win: a default
of ours would hide what the file says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_PREFIX = "--"
_NEGATION = "--no-"
_CONFIG = "--config"


@dataclass(frozen=True)
class GivenFlags:
    """Flags that have been given; `"--block-size" in flags` tells of one."""

    names: frozenset[str] = frozenset()
    """As vLLM's help has them, but possibly cut short."""

    def __contains__(self, flag: str) -> bool:
        # vLLM refuses a beginning that several flags share.
        return any(flag.startswith(name) for name in self.names)


def given_flags(arguments: Iterable[str], config_keys: Iterable[str] = ()) -> GivenFlags:
    """What is given on a command line, or in a file that it names.

    Args:
        arguments: flags and their values.
        config_keys: keys of the file.
    """
    flags = [argument for argument in arguments if argument.startswith(_PREFIX)]
    flags += [_PREFIX + key for key in config_keys]
    return GivenFlags(frozenset(map(_name, flags)) - {_PREFIX})


def with_config_apart(arguments: Sequence[str]) -> list[str]:
    """The same arguments with --config=FILE in two, since vLLM ignores it in one, silently."""
    apart = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        apart += [name, value] if name == _CONFIG and equals else [argument]
    return apart


def config_file(arguments: Sequence[str]) -> str | None:
    """The file from which vLLM takes further flags; None if there is none.

    Args:
        arguments: with --config apart from its value.
    """
    if _CONFIG not in arguments[:-1]:
        return None
    return arguments[arguments.index(_CONFIG) + 1]


def _name(flag: str) -> str:
    name = flag.partition("=")[0].partition(".")[0].replace("_", "-")
    return _PREFIX + name.removeprefix(_NEGATION) if name.startswith(_NEGATION) else name
