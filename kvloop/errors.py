"""Every error that kvloop raises, as a tree with one root.

    KvloopError
    ├── InvalidFieldError       a request field is at fault
    ├── NotFoundError           nothing of that name
    │   └── ModelNotFoundError
    ├── ConflictError           lost a race against a newer change
    ├── PreconditionError       the state of things does not allow it
    ├── LimitError              a configured limit is reached
    ├── UnavailableError        cannot be reached now; retrying may help
    │   └── TlsError
    ├── DeadlineError           the deadline passed
    ├── UnsupportedError        this deployment cannot do it
    ├── UnauthenticatedError    the credential is missing or not valid
    ├── PermissionDeniedError   known, and not allowed to do it
    └── InternalError           a defect in kvloop or in the engine

Servers raise these anywhere below the gRPC edge; one interceptor turns them
into a status with google.rpc.ErrorInfo. Clients get the same classes back from
`from_rpc_error`, so neither side handles grpc types.
"""

from __future__ import annotations

from typing import ClassVar, cast

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvloop.tls_trouble import tls_trouble

DOMAIN = "kvloop"

# A status may travel in HTTP/2 trailers, which peers bound to 8 KiB or so.
_MAX_METADATA_VALUE = 1024

RETRY_AFTER = "retry_after_seconds"
"""Metadata key: after how many seconds it may be worth asking again. Also sent as
google.rpc.RetryInfo."""

ENGINE_BODY = "engine_body"
"""Metadata key of an engine's whole error body. It is for kvloop's own hops,
whose channels allow for it, and does not reach callers of the gRPC API."""
MAX_ENGINE_BODY = 16 * 1024
"""Characters of an engine's error body that are passed on. A larger one is left
out, since a part of it is no JSON."""


class KvloopError(Exception):
    """Something kvloop could not do.

    Args:
        message: what happened and what to do, in a sentence for people.
        reason: UPPER_SNAKE_CASE for programs; the class's default if omitted.
        metadata: facts for programs, such as the field at fault.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self, message: str, *, reason: str | None = None, **metadata: str | int | float
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidFieldError(KvloopError):
    """A request field is missing, of the wrong type, or out of bounds."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_FIELD"

    @property
    def field(self) -> str:
        """Path of the field at fault, such as `messages[2].role`; may be empty."""
        return self.metadata.get("field", "")


class NotFoundError(KvloopError):
    """There is nothing of that name."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class ModelNotFoundError(NotFoundError):
    """No worker serves the model."""

    default_reason = "MODEL_NOT_FOUND"


class ConflictError(KvloopError):
    """A newer change came first; nothing was changed."""

    code = grpc.StatusCode.ABORTED
    default_reason = "CONFLICT"


class PreconditionError(KvloopError):
    """The state of things does not allow it; repeating will not help."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "PRECONDITION"


class OutOfRangeError(KvloopError):
    """A position lies outside of what is kept."""

    code = grpc.StatusCode.OUT_OF_RANGE
    default_reason = "OUT_OF_RANGE"


class LimitError(KvloopError):
    """A configured limit is reached."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "LIMIT"


class UnavailableError(KvloopError):
    """Cannot be reached now; repeating may help."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class TlsError(UnavailableError):
    """No connection came about, as the two ends do not agree on TLS.

    Never sent: each end finds it out for itself.
    """

    default_reason = "TLS_REFUSED"


class DeadlineError(KvloopError):
    """The deadline passed before there was an answer."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE"


class CancelledByPeerError(KvloopError):
    """The other side cancelled the call."""

    code = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


class UnsupportedError(KvloopError):
    """This deployment cannot do it."""

    code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "UNSUPPORTED"


class UnauthenticatedError(KvloopError):
    """The credential is missing or not valid."""

    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class PermissionDeniedError(KvloopError):
    """The caller is known, and is not allowed to do it."""

    code = grpc.StatusCode.PERMISSION_DENIED
    default_reason = "PERMISSION_DENIED"


class InternalError(KvloopError):
    """A defect, in kvloop or in the engine."""

    code = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"


_BY_CODE: dict[grpc.StatusCode, type[KvloopError]] = {
    cls.code: cls
    for cls in (
        InvalidFieldError,
        NotFoundError,
        ConflictError,
        PreconditionError,
        OutOfRangeError,
        LimitError,
        UnavailableError,
        DeadlineError,
        CancelledByPeerError,
        UnsupportedError,
        UnauthenticatedError,
        PermissionDeniedError,
        InternalError,
    )
}
_BY_REASON: dict[str, type[KvloopError]] = {
    ModelNotFoundError.default_reason: ModelNotFoundError,
}


def to_status(error: KvloopError) -> status_pb2.Status:
    """The google.rpc.Status that carries this error over the wire."""
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=DOMAIN,
        metadata={
            key: value[: MAX_ENGINE_BODY if key == ENGINE_BODY else _MAX_METADATA_VALUE]
            for key, value in error.metadata.items()
        },
    )
    detail = any_pb2.Any()
    detail.Pack(info)
    details = [detail]
    if (seconds := error.metadata.get(RETRY_AFTER)) is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(float(seconds) * 1000))
        details.append(any_pb2.Any())
        details[-1].Pack(retry)
    code: tuple[int, str] = error.code.value
    return status_pb2.Status(code=code[0], message=error.message, details=details)


def from_rpc_error(error: grpc.RpcError) -> KvloopError:
    """The kvloop error that the peer raised, or the nearest one for its status.

    A status without ErrorInfo of our domain comes from gRPC itself (say, a
    refused connection) and gets the class that fits its code.
    """
    call = cast("grpc.Call", error)  # what grpc raises is both, in sync and aio
    code: grpc.StatusCode = call.code()
    message = call.details() or code.name
    reason: str | None = None
    metadata: dict[str, str] = {}
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # status and trailers disagree: a proxy in between
        status = None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason, metadata = info.reason, dict(info.metadata)
    if reason is None and code is grpc.StatusCode.UNAVAILABLE:
        trouble = tls_trouble(message)
        if trouble is not None:
            return TlsError(trouble[1], reason=trouble[0])
    cls = _BY_REASON.get(reason or "") or _BY_CODE.get(code, KvloopError)
    made = cls(message, reason=reason)
    made.metadata = metadata
    return made
