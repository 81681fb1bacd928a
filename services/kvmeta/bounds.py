"""Bounds of request fields, as the protos document them."""

from __future__ import annotations

from collections.abc import Sized

from google.protobuf.duration_pb2 import Duration

from kvloop.errors import InvalidFieldError
from services.common.addresses import split_host_port
from services.kvmeta.model import MICROSECONDS

MAX_TENANT = 128
MAX_MODEL = 256
MAX_CONVERSATION_ID = 256
MAX_REQUEST_ID = 64
MAX_WORKER_ID = 128
MAX_HANDLE_ID = 64
MAX_LEASE_ID = 64
MAX_ENGINE_ID = 256
MAX_EPOCH = 64
MAX_TRAIT = 256
MAX_ADDRESS = 512
MAX_PAGE_SIZE = 1000
DEFAULT_PAGE_SIZE = 100
MAX_TURN = 2**53
MAX_PINS = 10_000
MAX_EVICTED = 1000
MAX_DURATION_US = 30 * 24 * 3600 * MICROSECONDS


def text(value: str, field: str, *, most: int) -> str:
    """A string of 1 to `most` characters, none of them NUL.

    Raises:
        InvalidFieldError: it is not.
    """
    if not value:
        raise InvalidFieldError(f"{field} is required", field=field)
    return optional_text(value, field, most=most)


def optional_text(value: str, field: str, *, most: int) -> str:
    """A string of at most `most` characters, none of them NUL.

    Raises:
        InvalidFieldError: it is not.
    """
    if len(value) > most:
        raise InvalidFieldError(
            f"{field} has {len(value)} characters, more than the {most} allowed", field=field
        )
    if "\x00" in value:  # PostgreSQL cannot store it
        raise InvalidFieldError(f"{field} contains a NUL character", field=field)
    return value


def number(value: int, field: str, *, least: int, most: int) -> int:
    """An integer within bounds.

    Raises:
        InvalidFieldError: it is not.
    """
    if not least <= value <= most:
        raise InvalidFieldError(f"{field} is {value}, not {least} to {most}", field=field)
    return value


def count(entries: Sized, field: str, *, least: int, most: int) -> None:
    """A number of entries within bounds.

    Raises:
        InvalidFieldError: it is not.
    """
    if not least <= len(entries) <= most:
        raise InvalidFieldError(
            f"{field} has {len(entries)} entries, not {least} to {most}", field=field
        )


def duration_us(value: Duration, field: str, *, zero_allowed: bool = False) -> int:
    """A duration in microseconds, above 0 unless zero is allowed.

    Raises:
        InvalidFieldError: it is negative, longer than 30 days, or 0.
    """
    us = value.seconds * MICROSECONDS + value.nanos // 1000
    if us > MAX_DURATION_US:
        raise InvalidFieldError(f"{field} is longer than 30 days", field=field)
    if us < 0 or (us == 0 and not zero_allowed):
        raise InvalidFieldError(f"{field} must be above 0", field=field)
    return us


def page_size(value: int) -> int:
    """Entries per page; 0 asks for the default.

    Raises:
        InvalidFieldError: it is out of bounds.
    """
    return number(value, "page_size", least=0, most=MAX_PAGE_SIZE) or DEFAULT_PAGE_SIZE


def address(value: str, field: str) -> str:
    """host:port, IPv6 hosts in brackets, port not 0.

    Raises:
        InvalidFieldError: it is not.
    """
    text(value, field, most=MAX_ADDRESS)
    try:
        _, port = split_host_port(value)
    except ValueError as error:
        raise InvalidFieldError(f"{field}: {error}", field=field) from error
    number(port, field, least=1, most=65535)
    return value


def bare_host(value: str, field: str) -> str:
    """A host without scheme, port or brackets.

    Raises:
        InvalidFieldError: it is not.
    """
    text(value, field, most=MAX_TRAIT)
    # More than one colon is an IPv6 address, which is bare here.
    if any(mark in value for mark in "/[] ") or value.count(":") == 1:
        raise InvalidFieldError(f"{field} is {value!r}, not a bare host", field=field)
    return value
