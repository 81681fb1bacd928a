"""TLS options in front of the subcommands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tls-certificate-file", "c.pem"], "need each other"),
        (["--tls-ca-file", "none.pem"], "No such file"),
    ],
)
def test_files_that_cannot_be_used_are_wrong_usage(
    kvloop: Callable[..., int], capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert kvloop(*options, "workers") == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_variables_stand_for_the_options(
    kvloop: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    broken = tmp_path / "ca.pem"
    broken.write_text("no certificate")
    monkeypatch.setenv("KVLOOP_TLS_CA_FILE", str(broken))
    assert kvloop("workers") == 2
    assert "TLS:" in capsys.readouterr().err
