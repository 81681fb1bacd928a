"""Generates the protobuf code when kvloop is built or installed.

Nothing generated is committed. `python hatch_build.py` does the same by hand,
after a change in protos/.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent


def generate(root: Path) -> list[Path]:
    """Write messages, services and type stubs for every proto file.

    Returns:
        The proto files, relative to their import root.

    Raises:
        RuntimeError: protoc refused a file; it has said why on stderr.
    """
    from grpc_tools import protoc  # build-time only

    proto_root = root / "protos"
    well_known = Path(protoc.__file__).parent / "_proto"
    sources = sorted(path.relative_to(proto_root) for path in proto_root.rglob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={proto_root}",
            f"--proto_path={well_known}",
            f"--python_out={root}",
            f"--grpc_python_out={root}",
            f"--mypy_out=quiet:{root}",
            f"--mypy_grpc_out=quiet:{root}",
            *map(str, sources),
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc failed with exit status {status}")
    return sources


class ProtocHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatch build hook that runs protoc before files are collected."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate in the source tree, where editable installs need it too."""
        generate(Path(self.root))


if __name__ == "__main__":
    sys.stdout.write(f"generated code for {len(generate(ROOT))} proto files\n")
