"""How many tokens a prompt has, guessed from its bytes by earlier prompts of the model."""

from __future__ import annotations

_ASSUMED_TOKENS_PER_BYTE = 0.25
_SMOOTHING = 0.05
"""Weight of a new prompt against the earlier ones."""


class PromptSizes:
    """Tokens per byte of request bodies, by model."""

    def __init__(self) -> None:
        self._tokens_per_byte: dict[str, float] = {}

    def tokens(self, model: str, body_bytes: int) -> int:
        """Tokens that a body of so many bytes is likely to have."""
        return int(body_bytes * self._tokens_per_byte.get(model, _ASSUMED_TOKENS_PER_BYTE))

    def learn(self, model: str, body_bytes: int, prompt_tokens: int) -> None:
        """A body had so many tokens. Ignored if its engine does not count them."""
        if prompt_tokens > 0 and body_bytes > 0:
            rate = prompt_tokens / body_bytes
            known = self._tokens_per_byte.get(model, rate)
            self._tokens_per_byte[model] = known + _SMOOTHING * (rate - known)
