"""Errors name the prompt as the caller does."""

from __future__ import annotations

import pytest

from kvloop.errors import InvalidFieldError, UnavailableError
from services.router.failures import name_prompt


@pytest.mark.parametrize("engines_name", ["input_tokens", "input_text"])
def test_the_engines_name_for_the_prompt_becomes_the_callers(engines_name: str) -> None:
    error = InvalidFieldError("too long", reason="ENGINE_REJECTED", field=engines_name)
    name_prompt(error, "messages")
    assert error.field == "messages"


def test_other_fields_keep_their_names() -> None:
    error = InvalidFieldError("bad", field="response_format")
    name_prompt(error, "messages")
    assert error.field == "response_format"
    without = UnavailableError("gone")
    name_prompt(without, "messages")
    assert without.metadata == {}
