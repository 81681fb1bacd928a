"""How many tokens a prompt has, guessed from its bytes by earlier prompts of the model."""

from __future__ import annotations

_ASSUMED_TOKENS_PER_BYTE = 0.25
_SMOOTHING = 0.05
"""Weight of a new prompt against the earlier ones."""


class PromptSizes:
    """Tokens per byte of request bodies, by model and by size of the body.

    A body with pictures has far fewer tokens per byte than text, and more bytes. So
    bodies are told apart by size, and pictures change little for prompts without.
    """

    def __init__(self) -> None:
        self._rates: dict[str, dict[int, float]] = {}  # by model and magnitude

    def tokens(self, model: str, body_bytes: int) -> int:
        """Tokens that a body of so many bytes is likely to have."""
        rates, size = self._rates.get(model), _magnitude(body_bytes)
        if not rates:
            return int(body_bytes * _ASSUMED_TOKENS_PER_BYTE)
        nearest = min(rates, key=lambda known: abs(known - size))
        return int(body_bytes * rates[nearest])

    def learn(self, model: str, body_bytes: int, prompt_tokens: int) -> None:
        """A body had so many tokens. Ignored if its engine does not count them."""
        if prompt_tokens > 0 and body_bytes > 0:
            rates, size = self._rates.setdefault(model, {}), _magnitude(body_bytes)
            rate = prompt_tokens / body_bytes
            known = rates.get(size, rate)
            rates[size] = known + _SMOOTHING * (rate - known)


def _magnitude(body_bytes: int) -> int:
    """Sizes within a factor of four have the same one."""
    return body_bytes.bit_length() // 2
