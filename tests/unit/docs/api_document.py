"""Writes the generated part of docs/api.md from the comments in protos/.

python -m tests.unit.docs.api_document
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grpc
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from kvloop.errors import KvloopError
from tests.unit.docs.generated_part import DOCS, cell, with_part

PAGE = DOCS / "api.md"
MODULE = "api_document"
PROTOS = DOCS.parent / "protos"
_NAMES = ("router/v1/router", "kvmeta/v1/ledger", "kvmeta/v1/registry", "worker/v1/worker")
FILES = tuple(f"kvloop/{name}.proto" for name in (*_NAMES, "common/v1/common"))
"""In the order of the page: what clients call comes first."""

_CODES = "|".join(code.name for code in grpc.StatusCode)
_ONE_ERROR = rf"(?:{_CODES})(?:\s\([A-Z_, ]+\))?"
_ERROR = re.compile(rf"(?:^|(?<=[.;] )|(?<=\n))({_ONE_ERROR}(?:\sand\s{_ONE_ERROR})?): ")

Place = tuple[int, ...]
"""Place of an element in its file, as SourceCodeInfo numbers it."""
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED_MESSAGES, _NESTED_ENUMS, _VALUES, _METHODS = 2, 3, 4, 2, 2


@cache
def descriptors() -> dict[str, FileDescriptorProto]:
    """kvloop's proto files by name, with their comments."""
    well_known = Path(protoc.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "descriptors"
        status = protoc.main(
            [
                "protoc",
                f"--proto_path={PROTOS}",
                f"--proto_path={well_known}",
                "--include_source_info",
                f"--descriptor_set_out={target}",
                *FILES,
            ]
        )
        assert status == 0, "protoc has said why"
        files = FileDescriptorSet.FromString(target.read_bytes()).file
    return {file.name: file for file in files}


def reference() -> str:
    """The generated part of the page."""
    return "\n".join([*_statuses(), *(line for name in FILES for line in _File(name).lines())])


def page() -> str:
    """The page as it should be."""
    return with_part(PAGE.read_text(), MODULE, reference())


def anchor(full_name: str) -> str:
    """Where the page has an element, as GitHub names headings."""
    return full_name.replace(".", "").lower()


def _statuses() -> Iterator[str]:
    """The classes that the client library raises, and where the contract names which."""
    yield "## Errors\n"
    yield "| status | class | | reasons named below |"
    yield "|---|---|---|---|"
    reasons = _reasons()
    for kind in sorted(_errors(KvloopError), key=lambda kind: kind.code.value[0]):
        if "Never sent" not in (kind.__doc__ or ""):
            summary = (kind.__doc__ or "").partition("\n")[0]
            own = {kind.default_reason}
            if kind.__base__ is KvloopError:
                below = {each.default_reason for each in kind.__subclasses__()}
                own = reasons.get(kind.code, set()) - below
            named = ", ".join(f"`{reason}`" for reason in sorted(own))
            yield f"| {kind.code.name} | `{kind.__name__}` | {summary} | {named} |"
    yield ""


def _errors(kind: type[KvloopError]) -> Iterator[type[KvloopError]]:
    for below in kind.__subclasses__():
        if below.__module__ == KvloopError.__module__:
            yield below
            yield from _errors(below)


def _reasons() -> dict[grpc.StatusCode, set[str]]:
    """Reasons in the comments of RPCs, by status."""
    named: dict[grpc.StatusCode, set[str]] = {}
    for file in descriptors().values():
        for location in file.source_code_info.location:
            text = " ".join(location.leading_comments.split())
            for code, reasons in re.findall(rf"\b({_CODES}) \(([A-Z_, ]+)\)", text):
                named.setdefault(grpc.StatusCode[code], set()).update(reasons.split(", "))
    return named


class _File:
    """One proto file."""

    def __init__(self, name: str) -> None:
        self._file = descriptors()[name]
        self._package = self._file.package
        self._comments = {
            tuple(location.path): location.leading_comments
            for location in self._file.source_code_info.location
        }

    def lines(self) -> Iterator[str]:
        """Services first, then messages and enums as the file has them."""
        yield f"## {self._file.name}\n"
        for index, service in enumerate(self._file.service):
            yield from self._service(service, (_SERVICES, index))
        for index, message in enumerate(self._file.message_type):
            yield from self._message(message, self._package, (_MESSAGES, index))
        for index, kind in enumerate(self._file.enum_type):
            yield from self._enum(kind, self._package, (_ENUMS, index))

    def _service(self, service: ServiceDescriptorProto, path: Place) -> Iterator[str]:
        name = f"{self._package}.{service.name}"
        yield f"### {name}\n"
        yield from prose(self._comment(path))
        for index, method in enumerate(service.method):
            given = _streamed(_link(method.input_type), method.client_streaming)
            got = _streamed(_link(method.output_type), method.server_streaming)
            yield f"#### {name}.{method.name}\n"
            yield f"{given} → {got}\n"
            yield from prose(self._comment((*path, _METHODS, index)))

    def _message(self, message: DescriptorProto, scope: str, path: Place) -> Iterator[str]:
        name = f"{scope}.{message.name}"
        yield f"### {name}\n"
        yield from prose(self._comment(path))
        if message.field:
            yield "| field | type | no. | |"
            yield "|---|---|---|---|"
        for index, field in enumerate(message.field):
            text = cell(self._comment((*path, _FIELDS, index)))
            if field.HasField("oneof_index") and not field.proto3_optional:
                text = f"One of `{message.oneof_decl[field.oneof_index].name}`. {text}"
            yield f"| `{field.name}` | {_type(field)} | {field.number} | {text} |"
        if message.field:
            yield ""
        for index, nested in enumerate(message.nested_type):
            yield from self._message(nested, name, (*path, _NESTED_MESSAGES, index))
        for index, kind in enumerate(message.enum_type):
            yield from self._enum(kind, name, (*path, _NESTED_ENUMS, index))

    def _enum(self, kind: EnumDescriptorProto, scope: str, path: Place) -> Iterator[str]:
        yield f"### {scope}.{kind.name}\n"
        yield from prose(self._comment(path))
        yield "| value | no. | |"
        yield "|---|---|---|"
        for index, value in enumerate(kind.value):
            text = cell(self._comment((*path, _VALUES, index)))
            yield f"| `{value.name}` | {value.number} | {text} |"
        yield ""

    def _comment(self, path: Place) -> str:
        return self._comments.get(path, "")


def prose(comment: str) -> Iterator[str]:
    """A comment as paragraphs, code blocks, and a list of the errors it names."""
    text = "\n".join(line.removeprefix(" ") for line in comment.strip("\n").split("\n"))
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("  "):
            yield f"```\n{paragraph}\n```\n"
            continue
        before, *errors = _ERROR.split(paragraph)
        if before.strip():
            yield f"{cell(before)}\n"
        for name, meaning in zip(errors[::2], errors[1::2], strict=True):
            yield f"- **{cell(name)}**: {cell(meaning)}"
        if errors:
            yield ""


def _type(field: FieldDescriptorProto) -> str:
    name = _link(field.type_name) if field.type_name else _scalar(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _scalar(field: FieldDescriptorProto) -> str:
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(type_name: str) -> str:
    name = type_name.removeprefix(".")
    short = name.rpartition(".")[2]
    if name.startswith("kvloop."):
        return f"[{short}](#{anchor(name)})"
    return name


def _streamed(text: str, streams: bool) -> str:
    return f"stream of {text}" if streams else text


if __name__ == "__main__":
    PAGE.write_text(page())
