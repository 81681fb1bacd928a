"""The simulated model: which token follows is a function of all KV, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b

from services.sim.kv import DIGEST_BYTES
from services.sim.tokenizer import EOS_ID, SPEAKABLE

_DRAW_RANGE = 2**32


@dataclass(frozen=True)
class Candidate:
    """A token and its log probability."""

    token: int
    logprob: float


class SimModel:
    """Chooses tokens.

    Args:
        answer_tokens: how long answers are on average before the model ends
            them by itself; 0: it never does.
    """

    def __init__(self, answer_tokens: int) -> None:
        self._end_below = _DRAW_RANGE // answer_tokens if answer_tokens else 0

    def next_token(self, digest: bytes, *, variation: bytes = b"", may_end: bool = True) -> int:
        """The token after everything that the digest covers.

        Args:
            digest: of all KV of the sequence.
            variation: tells choices and seeds apart; empty for the greedy answer.
            may_end: whether the end-of-turn token may be chosen.
        """
        if variation:
            digest = blake2b(digest + variation, digest_size=DIGEST_BYTES).digest()
        if may_end and int.from_bytes(digest[8:12], "little") < self._end_below:
            return EOS_ID
        return SPEAKABLE[int.from_bytes(digest[:8], "little") % len(SPEAKABLE)]


def logprob_of(digest: bytes) -> float:
    """The log probability of the chosen token: 0.5 to 1 of the mass."""
    return math.log(0.5 + 0.5 * int.from_bytes(digest[12:14], "little") / 2**16)


def candidates(digest: bytes, chosen: int, count: int) -> list[Candidate]:
    """The chosen token and the likeliest others, likeliest first.

    Args:
        digest: of all KV of the sequence.
        chosen: the token that was chosen.
        count: how many to return.
    """
    found = [Candidate(chosen, logprob_of(digest))]
    mass = 1.0 - math.exp(found[0].logprob)
    start = int.from_bytes(digest[:8], "little") + 1
    for index in range(start, start + 2 * len(SPEAKABLE)):
        if len(found) >= count:
            break
        mass /= 2
        token = SPEAKABLE[index % len(SPEAKABLE)]
        if all(token != other.token for other in found):
            found.append(Candidate(token, math.log(mass) if mass > 0 else -9999.0))
    return found[:count]
