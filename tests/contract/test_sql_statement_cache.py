"""Compiling a statement costs more than running it: each must be compiled once."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import sqlalchemy as sa

from services.kvmeta import sql
from services.kvmeta.sql.prepared import Prepared


def _statements() -> list[tuple[str, sa.ClauseElement]]:
    found: list[tuple[str, sa.ClauseElement]] = []
    for module in pkgutil.iter_modules(sql.__path__, f"{sql.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            statement = value.statement if isinstance(value, Prepared) else value
            if isinstance(statement, sa.ClauseElement) and isinstance(statement, sa.Executable):
                found.append((f"{module.name}.{name}", statement))
    return found


@pytest.mark.parametrize("statement", [pytest.param(s, id=name) for name, s in _statements()])
def test_a_statement_has_a_key_in_the_cache_of_compiled_ones(statement: sa.ClauseElement) -> None:
    assert statement._generate_cache_key() is not None
