"""Error replies as vLLM writes them."""

from __future__ import annotations

from http import HTTPStatus

import msgspec


class ApiError(Exception):
    """A request that gets an error reply.

    Args:
        message: for the client.
        status: HTTP status.
        type: vLLM's name for the kind of error.
        param: request field at fault.
        while_parsing: vLLM refuses the body before it looks at transfer params, so
            a prefill engine that waits for a read is not told.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "BadRequestError",
        param: str | None = None,
        while_parsing: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.while_parsing = while_parsing

    def to_json(self) -> bytes:
        """The body of the reply, and the data of an error event in a stream."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.status,
                }
            }
        )


def invalid_value(message: str, parameter: str, value: object = None) -> ApiError:
    """A value that vLLM refuses after it has read the body."""
    shown = f", value={value}" if value is not None else ""
    return ApiError(f"{message} (parameter={parameter}{shown})", param=parameter)


def invalid_body(location: str, kind: str, message: str) -> ApiError:
    """A body that does not have the right form: FastAPI's kind of error."""
    return ApiError(
        f"1 validation error:\n  {{'type': '{kind}', 'loc': '{location}', 'msg': '{message}'}}",
        type=HTTPStatus.BAD_REQUEST.phrase,
        param=location,
        while_parsing=True,
    )


def invalid_combination(message: str, parameter: str) -> ApiError:
    """Fields that do not go together: refused while the body is read."""
    return ApiError(
        f"1 validation error:\n  {{'type': 'value_error', 'loc': 'body', "
        f"'msg': 'Value error, {message} (parameter={parameter})'}}",
        type=HTTPStatus.BAD_REQUEST.phrase,
        param=parameter,
        while_parsing=True,
    )


def model_not_found(name: str, served: str) -> ApiError:
    """The engine does not serve the model."""
    return ApiError(
        f"The model `{name}` does not exist. Valid aliases: {served}.",
        status=404,
        type="NotFoundError",
        param="model",
    )


def internal_error() -> ApiError:
    """The engine has failed with the request, as when a KV load fails."""
    return ApiError("Internal server error", status=500, type="InternalServerError")


def error_type(status: int) -> str:
    """vLLM's name for the errors that it replies to with a status."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        return "Error"
    return phrase.title().replace(" ", "").removesuffix("Error") + "Error"
