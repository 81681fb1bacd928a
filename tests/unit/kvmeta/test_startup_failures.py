"""Why kvmeta cannot start on a database, without what must not be told."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from kvloop.errors import UnavailableError
from services.kvmeta import app
from services.kvmeta.settings import KvmetaSettings
from services.kvmeta.startup_failures import startup_failures


async def test_a_file_of_another_kind_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("These are notes, and no database.\n" * 100)
    settings = KvmetaSettings(listen="127.0.0.1:0", database_url=f"sqlite:///{path}")
    with pytest.raises(UnavailableError) as caught:
        async with app.build(settings):
            pass

    assert caught.value.reason == "DATABASE_REFUSED"
    assert str(path) in str(caught.value)
    assert "another kind" in str(caught.value)
    assert path.read_text().startswith("These are notes")


def test_of_a_urls_options_only_the_address_is_told() -> None:
    options = "host=db.example&port=5433&user=u&password=hunter2&passfile=hunter2"
    with (
        pytest.raises(UnavailableError) as caught,
        startup_failures(sa.make_url(f"postgresql://u:hunter2@/name?{options}")),
    ):
        raise UnavailableError("away") from ConnectionRefusedError("refused")

    assert "host=db.example" in str(caught.value)
    assert "port=5433" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_defect_in_a_statement_is_left_as_it_is() -> None:
    defect = sa.exc.ProgrammingError("SELECT", None, Exception("no such table"))
    with pytest.raises(sa.exc.ProgrammingError), startup_failures(sa.make_url("sqlite:///x")):
        raise defect
