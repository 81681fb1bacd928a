"""Writes the tables of docs/configuration.md from the settings of the services.

python -m tests.unit.docs.configuration_document
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from services.kvmeta.settings import KvmetaSettings
from services.router.settings import RouterSettings
from services.sim.settings import SimSettings
from services.worker.settings import WorkerSettings
from tests.unit.docs.generated_part import DOCS, cell, with_part

PAGE = DOCS / "configuration.md"
MODULE = "configuration_document"

SERVICES: dict[str, type[BaseSettings]] = {
    "router": RouterSettings,
    "kvmeta": KvmetaSettings,
    "worker": WorkerSettings,
    "sim": SimSettings,
}

BY_ROLE = "by role"
DEFAULTS: dict[tuple[str, str], str] = {
    ("worker", "listen"): BY_ROLE,
    ("worker", "engine_port"): BY_ROLE,
    ("worker", "side_channel_port"): BY_ROLE,
    ("worker", "worker_id"): "`ROLE-HOST-PORT`",
    ("worker", "engine_python"): "the sidecar's own",
    ("worker", "engine_log"): "`WORKER_ID.log` in `kvloop-UID` of the temporary folder",
    ("worker", "events_socket"): "`WORKER_ID.sock` in the same",
    ("sim", "port"): BY_ROLE,
    ("sim", "side_channel_port"): BY_ROLE,
    ("sim", "events_socket"): "`$KVLOOP_EVENTS_SOCKET`",
}
"""Defaults that follow from other settings or from the machine."""

_KINDS = {bool: "switch", int: "integer", float: "number", str: "text", Path: "path"}


def tables() -> str:
    """The generated part of the page."""
    return "\n".join(
        line for name, settings in SERVICES.items() for line in _section(name, settings)
    )


def page() -> str:
    """The page as it should be."""
    return with_part(PAGE.read_text(), MODULE, tables())


def _section(name: str, settings: type[BaseSettings]) -> Iterator[str]:
    prefix = settings.model_config["env_prefix"]
    yield f"## {name}\n"
    yield f"`python -m services.{name}`; variables `{prefix}…`\n"
    yield "| flag | variable | type | default | |"
    yield "|---|---|---|---|---|"
    for field_name, field in sorted(settings.model_fields.items(), key=_is_shared(settings)):
        yield _row(name, prefix, field_name, field)
    yield ""


def _is_shared(settings: type[BaseSettings]) -> Callable[[tuple[str, FieldInfo]], bool]:
    """Sorts what services have in common behind what is a service's own."""
    own = settings.__annotations__
    return lambda item: item[0] not in own or "tls_" in item[0]


def _row(service: str, prefix: str, name: str, field: FieldInfo) -> str:
    switch = "[no-]" if field.annotation is bool else ""
    columns = [
        f"`--{switch}{name.replace('_', '-')}`",
        f"`{prefix}{name.upper()}`",
        cell(_type(field.annotation, field.metadata)),
        _default(service, name, field),
        cell(field.description or ""),
    ]
    return f"| {' | '.join(columns)} |"


def _type(annotation: Any, metadata: list[Any]) -> str:
    """What may be given, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        (inner,) = (each for each in arguments if each is not type(None))
        return _type(inner, metadata)
    if origin is Annotated:
        return _type(arguments[0], [*arguments[1:], *metadata])
    if origin is list:
        return f"{_type(arguments[0], [])}, repeatable"
    return ", ".join([_KINDS[annotation], *_bounds(metadata)])


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for each in metadata:
        match each:
            case annotated_types.Ge(ge=bound):
                yield f"≥ {bound}"
            case annotated_types.Gt(gt=bound):
                yield f"> {bound}"
            case annotated_types.Le(le=bound):
                yield f"≤ {bound}"
            case annotated_types.Lt(lt=bound):
                yield f"< {bound}"


def _default(service: str, name: str, field: FieldInfo) -> str:
    described = DEFAULTS.get((service, name))
    if described == BY_ROLE:
        return ", ".join(f"{_made(field, role)} for {role}" for role in ("prefill", "decode"))
    if described is not None:
        return described
    if field.is_required():
        return "**required**"
    if field.annotation is bool:
        return "on" if field.default else "off"
    if field.default in (None, "", []):
        return ""
    return f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"


def _made(field: FieldInfo, role: str) -> str:
    make: Any = field.default_factory
    return f"`{make({'role': role})}`"


if __name__ == "__main__":
    PAGE.write_text(page())
