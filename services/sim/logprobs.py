"""Log probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.sim.model import Candidate, candidates, logprob_of
from services.sim.tokenizer import token_text


def chat_logprobs(tokens: Sequence[int], digests: Sequence[bytes], top: int) -> dict[str, Any]:
    """The logprobs object of a chat choice.

    Args:
        tokens: the tokens.
        digests: digest before each token.
        top: how many candidates to list per token.
    """
    return {
        "content": [
            {
                **_entry(Candidate(token, logprob_of(digest))),
                "top_logprobs": [_entry(other) for other in candidates(digest, token, top)]
                if top > 0
                else [],
            }
            for token, digest in zip(tokens, digests, strict=True)
        ]
    }


def completion_logprobs(
    tokens: Sequence[int], digests: Sequence[bytes], top: int, *, offset: int = 0
) -> dict[str, Any]:
    """The logprobs object of a completion choice.

    Args:
        tokens: the tokens.
        digests: digest before each token.
        top: how many candidates to list per token, the chosen one aside.
        offset: characters of text before the first token.
    """
    texts = [token_text(token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [logprob_of(digest) for digest in digests],
        "tokens": texts,
        "top_logprobs": [
            {
                token_text(other.token): other.logprob
                for other in candidates(digest, token, max(top, 1))
            }
            for token, digest in zip(tokens, digests, strict=True)
        ],
    }


def _entry(candidate: Candidate) -> dict[str, Any]:
    text = token_text(candidate.token)
    return {
        "token": text,
        "logprob": candidate.logprob,
        "bytes": list(text.encode(errors="replace")),
    }
