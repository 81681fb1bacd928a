"""docs/faults.md names tests that exist, and every test that names a row."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "faults.md"

_ROW = re.compile(r"^\| (?P<row>[A-E]\d+) \| .+ \| .+ \| (?P<tests>`.+`) \|$", re.MULTILINE)
_IN_A_NAME = re.compile(r"_([A-E]\d+)(?=_)")


def _rows() -> dict[str, list[str]]:
    """Node ids by row."""
    rows = {}
    for match in _ROW.finditer(PAGE.read_text()):
        assert match["row"] not in rows, f"{match['row']} is there twice"
        rows[match["row"]] = re.findall(r"`([^`]+)`", match["tests"])
    return rows


def _tests(path: Path) -> Iterator[str]:
    """Names of the tests in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:5] == "test_":
            yield node.name


def _rows_of(name: str) -> list[str]:
    """The rows that a test's name begins with."""
    leading = re.match(r"test((?:_[A-E]\d+)+)_", name)
    return _IN_A_NAME.findall(leading[1] + "_") if leading else []


def test_every_test_that_is_named_exists() -> None:
    missing = [
        node
        for nodes in _rows().values()
        for node in nodes
        if not (ROOT / node.partition("::")[0]).exists()
        or node.partition("::")[2] not in _tests(ROOT / node.partition("::")[0])
    ]
    assert not missing


def test_every_row_has_tests_and_the_page_has_many_rows() -> None:
    rows = _rows()
    assert all(rows.values())
    assert len(rows) > 45
    assert len(rows) == len(re.findall(r"^\| [A-E]\d+ \|", PAGE.read_text(), re.MULTILINE))


def test_every_test_that_names_a_row_is_on_the_page() -> None:
    rows = _rows()
    absent = [
        f"{row}: {path.relative_to(ROOT)}::{name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in _tests(path)
        for row in _rows_of(name)
        if f"{path.relative_to(ROOT)}::{name}" not in rows.get(row, ())
    ]
    assert not absent


def test_rows_are_read_from_names() -> None:
    assert _rows_of("test_D2_D3_C9_a_streamed_turn") == ["D2", "D3", "C9"]
    assert _rows_of("test_a_turn_of_B1_kind") == []
