"""Names in client certificates against the list of those that may call."""

from __future__ import annotations

import pytest

from kvloop.errors import PermissionDeniedError
from services.common.tls_clients import check_client, client_names

ALLOWED = frozenset({"router.kvloop", "spiffe://prod/router"})


def test_names_are_dns_names_and_uris_of_the_certificate() -> None:
    context = {
        "peer_dns": [b"router.kvloop", b"r"],
        "peer_uri": [b"spiffe://prod/router"],
        "peer_email": [b"router@kvloop"],
        "x509_common_name": [b"worker.kvloop"],
    }
    assert client_names(context) == {"router.kvloop", "r", "spiffe://prod/router"}
    assert client_names({"transport_security_type": [b"insecure"]}) == frozenset()


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_one_name_of_the_list_is_enough(name: str) -> None:
    check_client(frozenset({"other", name}), ALLOWED)


@pytest.mark.parametrize("names", [set(), {"worker.kvloop"}, {"ROUTER.kvloop", "x.router.kvloop"}])
def test_others_are_denied_with_the_names_that_they_have(names: set[str]) -> None:
    with pytest.raises(PermissionDeniedError) as caught:
        check_client(frozenset(names), ALLOWED)
    assert all(name in caught.value.message for name in names or {"none"})
