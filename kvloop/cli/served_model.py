"""Which of the served models is meant."""

from __future__ import annotations

from kvloop.client import Client
from kvloop.errors import InvalidFieldError, ModelNotFoundError


def choose_model(client: Client, name: str) -> str:
    """The model asked for; without a name, the only one that is served.

    Raises:
        ModelNotFoundError: none is served.
        InvalidFieldError: several are; the message lists them.
    """
    if name:
        return name
    names = [model.name for model in client.models()]
    if not names:
        raise ModelNotFoundError("no model is served yet: no prefill and decode worker are up")
    if len(names) > 1:
        raise InvalidFieldError(
            f"several models are served, choose one with --model: {', '.join(names)}", field="model"
        )
    return names[0]
