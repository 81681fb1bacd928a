"""What gRPC says when two ends do not agree on TLS, in plain words.

gRPC reports all of it as UNAVAILABLE with texts of its TLS library. The words
name no address: errors travel further than addresses should.
"""

from __future__ import annotations

_NOT_CONNECTED = "failed to connect"


def tls_trouble(details: str) -> tuple[str, str] | None:
    """Reason and message if a call failed because no TLS connection came about.

    Args:
        details: of a status UNAVAILABLE that gRPC itself made.
    """
    if "WRONG_VERSION_NUMBER" in details:
        return (
            "TLS_NOT_SPOKEN",
            "the server speaks plain text, and this client TLS: switch TLS on there or off here",
        )
    if "CERTIFICATE_VERIFY_FAILED" in details:
        why = details.partition("CERTIFICATE_VERIFY_FAILED: ")[2].partition(":")[0]
        return (
            "CERTIFICATE_NOT_TRUSTED",
            "the server's certificate is not trusted by the authorities that this client knows"
            + (f" ({why})" if why else ""),
        )
    if "Hostname Verification Check failed" in details:
        return (
            "CERTIFICATE_OF_ANOTHER",
            "the server's certificate is for other names than the one called: call it by one of "
            "them, or say which name to expect",
        )
    if _NOT_CONNECTED in details and "Socket closed" in details:
        return (
            "TLS_REFUSED",
            "the server hung up before the first call: it speaks TLS and this client does not, or "
            "it does not accept the client's certificate (absent, expired, of another authority)",
        )
    return None
