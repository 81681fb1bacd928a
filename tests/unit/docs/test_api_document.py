"""docs/api.md is what the comments in protos/ say."""

from __future__ import annotations

import re

from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from kvloop.router.v1 import router_pb2
from kvloop.worker.v1 import worker_pb2
from tests.unit.docs.api_document import FILES, PAGE, PROTOS, page, prose

MODULES = (router_pb2, ledger_pb2, registry_pb2, worker_pb2, common_pb2)


def test_the_api_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.unit.docs.api_document"


def test_every_proto_file_is_on_the_page() -> None:
    assert sorted(FILES) == sorted(
        str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto")
    )


def test_everything_has_a_heading_and_a_comment() -> None:
    text = PAGE.read_text()
    files = [module.DESCRIPTOR for module in MODULES]
    names = {
        each.full_name
        for file in files
        for kinds in (file.message_types_by_name, file.enum_types_by_name, file.services_by_name)
        for each in kinds.values()
    } | {
        method.full_name
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    }
    headings = re.findall(r"^#{3,4} (kvloop\..+)$", text, re.MULTILINE)
    assert names <= set(headings)
    assert len(headings) == len(set(headings))
    assert not re.findall(r"^\| `.*\| *\|$", text, re.MULTILINE), "a field without a comment"


def test_errors_in_a_comment_become_a_list() -> None:
    comment = (
        " Chat runs a turn.\n\n"
        " NOT_FOUND: nobody serves the\n model. UNAVAILABLE (DRAINING, GONE): later.\n"
        " ABORTED (X) and INTERNAL\n (Y): both\n"
    )

    assert list(prose(comment)) == [
        "Chat runs a turn.\n",
        "- **NOT_FOUND**: nobody serves the model.",
        "- **UNAVAILABLE (DRAINING, GONE)**: later.",
        "- **ABORTED (X) and INTERNAL (Y)**: both",
        "",
    ]


def test_indented_lines_of_a_comment_are_a_block() -> None:
    assert list(prose(" States:\n\n   A -> B\n   B -> C\n")) == [
        "States:\n",
        "```\n  A -> B\n  B -> C\n```\n",
    ]
