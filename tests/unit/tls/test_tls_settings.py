"""TLS settings: named alike in all services, and checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp

from services.common.tls_settings import PeerTlsSettings, ServerTlsSettings
from services.kvmeta.settings import KvmetaSettings
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from tests.flow.tls.authority import Authority

WORKER: dict[str, Any] = {"role": "decode", "engine_url": "http://[::1]:8200"}
SERVERS: list[tuple[type[ServerTlsSettings], dict[str, Any]]] = [
    (KvmetaSettings, {}),
    (RouterSettings, {}),
    (WorkerSettings, WORKER),
]
CALLERS: list[tuple[type[PeerTlsSettings], dict[str, Any]]] = [
    (RouterSettings, {}),
    (WorkerSettings, WORKER),
]


@pytest.mark.parametrize(("kind", "more"), SERVERS)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tls_key_file": "k"}, "need each other"),
        ({"tls_certificate_file": "c"}, "need each other"),
        ({"tls_client_ca_file": "a"}, "needs tls_certificate_file"),
    ],
)
def test_half_a_server_is_refused(
    kind: type[BaseSettings], more: dict[str, Any], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        kind(**more, **given)


@pytest.mark.parametrize(("kind", "more"), [SERVERS[0], SERVERS[2]])
def test_a_list_of_clients_needs_their_certificates(
    kind: type[BaseSettings], more: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError, match="needs tls_client_ca_file"):
        kind(**more, tls_allowed_clients="router.kvloop")


@pytest.mark.parametrize(("kind", "more"), CALLERS)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"peer_tls_ca_file": "a", "peer_tls_key_file": "k"}, "need each other"),
        ({"peer_tls_certificate_file": "c", "peer_tls_key_file": "k"}, "needs peer_tls_ca_file"),
    ],
)
def test_half_a_caller_is_refused(
    kind: type[BaseSettings], more: dict[str, Any], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        kind(**more, **given)


@pytest.mark.parametrize(("kind", "more"), SERVERS)
def test_without_certificates_nothing_is_encrypted(
    kind: type[ServerTlsSettings], more: dict[str, Any]
) -> None:
    assert kind(**more).server_tls() is None


@pytest.mark.parametrize(("kind", "more"), CALLERS)
def test_without_an_authority_others_are_called_in_plain_text(
    kind: type[PeerTlsSettings], more: dict[str, Any]
) -> None:
    assert kind(**more).peer_tls("kvmeta.kvloop") is None


def test_flags_and_variables_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    me = authority.issue("worker")
    by_flag = CliApp.run(
        WorkerSettings,
        cli_args=[
            *("--role", "decode", "--engine-url", "http://[::1]:8200"),
            *(f"--tls-certificate-file={me.certificate}", f"--tls-key-file={me.key}"),
            *(f"--tls-client-ca-file={authority.file}", "--tls-allowed-clients=a, b,"),
            *(f"--peer-tls-ca-file={authority.file}", "--peer-tls-kvmeta-name=kvmeta.kvloop"),
        ],
    )
    for name, value in {
        "TLS_CERTIFICATE_FILE": str(me.certificate),
        "TLS_KEY_FILE": str(me.key),
        "TLS_CLIENT_CA_FILE": str(authority.file),
        "TLS_ALLOWED_CLIENTS": "a, b,",
        "PEER_TLS_CA_FILE": str(authority.file),
        "PEER_TLS_KVMETA_NAME": "kvmeta.kvloop",
    }.items():
        monkeypatch.setenv(f"KVLOOP_WORKER_{name}", value)
    assert WorkerSettings(**WORKER) == by_flag
    server = by_flag.server_tls()
    assert server is not None
    assert server.allowed_clients == {"a", "b"}
    peer = by_flag.peer_tls(by_flag.peer_tls_kvmeta_name)
    assert peer is not None
    assert peer.current().server_name == "kvmeta.kvloop"


def test_files_that_do_not_fit_together_stop_the_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, other = authority.issue("one"), authority.issue("other")
    settings = KvmetaSettings(tls_certificate_file=one.certificate, tls_key_file=other.key)
    with pytest.raises(OSError, match="KEY_VALUES_MISMATCH"):
        settings.server_tls()


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (KvmetaSettings, {"listen": "http://127.0.0.1:7200"}),
        (RouterSettings, {"kvmeta": "http://kvmeta:7200"}),
        (RouterSettings, {"listen": "https://[::1]:7100"}),
        (WorkerSettings, WORKER | {"kvmeta": "http://kvmeta:7200"}),
        (WorkerSettings, WORKER | {"advertise": "http://[fd00::1]:7400"}),
    ],
)
def test_E3_urls_are_refused_where_addresses_are_wanted(
    kind: type[BaseSettings], given: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError, match="has a scheme; expected host:port"):
        kind(**given)
