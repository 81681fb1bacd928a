"""Values that follow their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloop.file_value import FileValue


class _Read:
    """A file that holds a number, and what is told about it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "number"
        self.path.write_text("1")
        self.now = 0.0
        self.reads = 0
        self.outcomes: list[Exception | None] = []
        self.value = FileValue(
            [self.path], self._read, clock=lambda: self.now, on_read=self.outcomes.append
        )

    def _read(self) -> int:
        self.reads += 1
        return int(self.path.read_text())


@pytest.fixture
def read(tmp_path: Path) -> _Read:
    return _Read(tmp_path)


def test_it_is_looked_at_once_a_second_and_read_when_it_changed(read: _Read) -> None:
    read.path.write_text("22")
    assert read.value.current() == 1
    read.now += 1
    assert read.value.current() == 22
    read.now += 1
    assert read.value.current() == 22
    assert (read.reads, read.outcomes) == (2, [None])


def test_what_cannot_be_read_changes_nothing_and_is_tried_again(read: _Read) -> None:
    for broken in ("x", None):
        read.path.write_text(broken) if broken else read.path.unlink()
        read.now += 1
        assert read.value.current() == 1
    read.path.write_text("3")
    read.now += 1
    assert read.value.current() == 3
    assert [type(outcome) for outcome in read.outcomes] == [
        ValueError,
        FileNotFoundError,
        type(None),
    ]


def test_a_reload_reads_at_once_even_what_looks_unchanged(read: _Read) -> None:
    read.value.reload()
    assert (read.value.current(), read.reads) == (1, 2)
    read.path.write_text("5")
    read.value.reload()
    assert (read.value.current(), read.reads) == (5, 3)


def test_files_that_change_while_they_are_read_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    now = 0.0
    writes = iter(["", "333", "", ""])

    def slow_read() -> int:
        found = int(path.read_text())
        if written := next(writes):
            path.write_text(written)
        return found

    value = FileValue([path], slow_read, clock=lambda: now)
    path.write_text("22")
    now += 1
    assert value.current() == 1  # the file changed again under the reading
    now += 1
    assert value.current() == 333


def test_the_first_reading_has_to_succeed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileValue([tmp_path / "none"], lambda: 1, clock=lambda: 0.0)
