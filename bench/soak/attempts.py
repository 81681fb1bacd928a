"""One sending of a turn, and how long it may take."""

from __future__ import annotations

import asyncio

from bench.soak.speakers import Heard, Manner, Speaker
from bench.soak.talks import Talk
from bench.soak.tally import Tally


class Attempts:
    """Sends turns, and knows how many are under way.

    Args:
        tally: counts those that hang.
        seconds: after which one does.
    """

    def __init__(self, tally: Tally, seconds: float) -> None:
        self._tally = tally
        self._seconds = seconds
        self.open = 0
        """Turns under way."""

    async def say(self, speaker: Speaker, talk: Talk, manner: Manner) -> Heard | None:
        """What was heard; None if it hung, which is counted."""
        self.open += 1
        try:
            async with asyncio.timeout(self._seconds):
                return await speaker.say(talk, manner)
        except TimeoutError:
            self._tally.hangs(talk.name, self._seconds)
            return None
        finally:
            self.open -= 1
