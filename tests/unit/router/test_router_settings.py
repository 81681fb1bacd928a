"""Settings come from flags and the environment, and contradictions are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from services.router.settings import RouterSettings


def test_flags_beat_the_environment_which_beats_defaults(monkeypatch) -> None:
    monkeypatch.setenv("KVLOOP_ROUTER_LISTEN", "[::1]:1")
    monkeypatch.setenv("KVLOOP_ROUTER_KVMETA", "meta:2")
    settings = CliApp.run(
        RouterSettings, cli_args=["--listen", "0.0.0.0:3", "--ledger-timeout-seconds", "0.5"]
    )
    assert settings.listen == "0.0.0.0:3"
    assert settings.kvmeta == "meta:2"
    assert settings.ledger_timeout_seconds == 0.5
    assert settings.metrics_listen is None


@pytest.mark.parametrize(
    "fields",
    [
        {"listen": "nonsense"},
        {"listen": "::1:80"},
        {"kvmeta": "http://host:1"},
        {"metrics_listen": "host"},
        {"gateway_listen": "host"},
        {"api_keys": "a not-a-digest"},
        {"rate_limit": "many"},
        {"policy": "best"},
        {"worker_failures": 0},
        {"tls_certificate_file": "c.pem"},
        {"tls_client_ca_file": "ca.pem"},
        {"ledger_timeout_seconds": 0},
        {"ledger_timeout_seconds": 6.0},
        {"registry_retry_seconds": 3.0},
        {"max_turn_seconds": 0.01},
        {"log_level": "loud"},
        {"unknown": 1},
    ],
)
def test_contradictions_are_refused(fields) -> None:
    with pytest.raises(ValidationError):
        RouterSettings(**fields)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        RouterSettings().listen = "127.0.0.1:9"
