"""Settings refuse what cannot work and say why."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from services.common.process import load_settings
from services.kvmeta.settings import KvmetaSettings


def test_the_defaults_are_valid() -> None:
    settings = KvmetaSettings()
    assert settings.listen == "127.0.0.1:7200"
    assert settings.policy().handle_margin_us == 5_000_000
    assert settings.policy().handle_ttl_us is None


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("listen", "7200", "host:port"),
        ("metrics_listen", "localhost", "host:port"),
        ("database_url", "kvmeta.db", "not a database URL"),
        ("database_url", "mysql://host/name", "not supported"),
        ("database_url", "postgresql://host/name?sslmode=require", "is called ssl"),
        ("database_url", "postgresql://host/name?connect_timeout=3", "no such option: connect_"),
        ("database_url", "postgresql://host:port/name", "not a database URL"),
        ("database_url", "sqlite://", "needs a file"),
        ("database_url", "sqlite:///:memory:", "needs a file"),
        ("lease_ttl_seconds", 1000, "max_lease_ttl_seconds"),
        ("lease_ttl_seconds", 0.1, "min_lease_ttl_seconds"),
        ("handle_margin_seconds", -1, "greater than or equal to 0"),
        ("handle_ttl_seconds", 0, "greater than 0"),
        ("max_params_bytes", 0, "greater than or equal to 1"),
        ("unknown", 1, "Extra inputs"),
    ],
)
def test_a_wrong_value_is_refused_with_its_reason(field, value, text) -> None:
    with pytest.raises(ValidationError, match=text):
        KvmetaSettings(**{field: value})


@pytest.mark.parametrize(
    "url",
    [
        "postgresql//user:hunter2@host/name",
        "postgresql://user:p@hunter2@host/name",
        "postgresql://user:p@host:hunter2@host/name",
        "postgresql://user@host/name?Password=hunter2",
        "mysql://user:hunter2@host/name",
    ],
)
def test_a_database_url_is_refused_without_its_password(url, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["kvmeta", "--database-url", url])
    with pytest.raises(SystemExit) as ended:
        load_settings(KvmetaSettings)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("--database-url: ")
    assert "hunter2" not in told


@pytest.mark.parametrize(
    "url",
    [
        "memory:",
        "sqlite:///kvmeta.db",
        "sqlite+aiosqlite:////var/lib/kvmeta.db",
        "postgresql://kvloop@db/kvloop",
        "postgresql://kvloop@db/kvloop?ssl=verify-full",
        "postgresql+asyncpg://kvloop:secret@db:5432/kvloop",
    ],
)
def test_supported_databases_are_accepted(url) -> None:
    assert KvmetaSettings(database_url=url).database_url == url


def test_flags_and_environment_set_the_same_fields(monkeypatch) -> None:
    monkeypatch.setenv("KVLOOP_KVMETA_HANDLE_TTL_SECONDS", "60")
    settings = CliApp.run(
        KvmetaSettings,
        ["--listen", "[::1]:0", "--database-url", "memory:", "--log-level", "debug", "--log-json"],
    )
    assert settings.handle_ttl_seconds == 60
    assert (settings.listen, settings.log_level, settings.log_json) == ("[::1]:0", "debug", True)


@pytest.mark.timeout(120)  # a process takes its time to start on a busy machine
def test_help_teaches_every_flag() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "services.kvmeta", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "conversation ledger" in shown
    for name in KvmetaSettings.model_fields:
        assert f"--{name.replace('_', '-')}" in shown


@pytest.mark.timeout(120)
def test_a_wrong_flag_exits_with_2_and_names_it() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "services.kvmeta", "--lease-ttl-seconds", "-1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 2
    assert "--lease-ttl-seconds: " in shown.stderr
