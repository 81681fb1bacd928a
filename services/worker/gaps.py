"""How long conversations pause before their next turn, and whether one comes at all.

An estimate of survival: what was seen of pauses that ended with a turn, and of
pauses that were cut short by a release or a deadline, gives the chance that a
conversation which has been silent for so long comes back within so long. No time
passes here, and memory is bounded.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import accumulate

_BOUNDS = tuple(2 ** (half / 2) for half in range(35))
"""Ends of the classes of pauses, in seconds: 1 s, 1.4 s, 2 s ... 36 h, and all above."""
_CLASSES = len(_BOUNDS) + 1
_PRIOR_HAZARD = 0.15
"""Chance that a pause ends in the class it has reached, before anything was seen.
Pauses then have a heavy tail: the longer the silence, the longer it will last."""
_PRIOR_WEIGHT = 8.0
"""Pauses that must be seen for observation to weigh as much as what was known before."""
_REMEMBERED = 1024.0
"""Pauses beyond which the old count half: habits change."""
_MAX_TENANTS = 1000
_SURE = 1 - 1e-9


@dataclass
class _Pauses:
    """Counts of pauses by class of length."""

    returned: list[float] = field(default_factory=lambda: [0.0] * _CLASSES)
    cut_short: list[float] = field(default_factory=lambda: [0.0] * _CLASSES)
    total: float = 0.0

    def add(self, counts: list[float], seconds: float) -> None:
        counts[_class_of(seconds)] += 1
        self.total += 1
        if self.total > _REMEMBERED:
            self.returned = [count / 2 for count in self.returned]
            self.cut_short = [count / 2 for count in self.cut_short]
            self.total /= 2

    def hazards(self, prior: list[float]) -> list[float]:
        """Chance, for each class, that a pause which reaches it ends within it."""
        found = [0.0] * _CLASSES
        reached = 0.0
        for index in reversed(range(_CLASSES)):
            reached += self.returned[index] + self.cut_short[index]
            # A pause that was cut short was watched for half of its class on average.
            at_risk = reached - self.cut_short[index] / 2
            seen = self.returned[index] + _PRIOR_WEIGHT * prior[index]
            found[index] = seen / (at_risk + _PRIOR_WEIGHT)
        return found


class Outlook:
    """Chances of a next turn. Made by `PauseHistory.outlook`.

    Args:
        hazards: chance, for each class of pauses, that a pause which reaches it ends
            within it.
    """

    def __init__(self, hazards: list[float]) -> None:
        self._steps = [math.log1p(-min(hazard, _SURE)) for hazard in hazards]
        self._starts = [0.0, *accumulate(self._steps)]

    def chance(self, silent_seconds: float, within_seconds: float) -> float:
        """Chance that a conversation which has been silent for so long has its next
        turn within so long from now; 0 to 1."""
        if within_seconds <= 0:
            return 0.0
        end = self._log_survival(silent_seconds + within_seconds)
        return 1 - math.exp(end - self._log_survival(silent_seconds))

    def _log_survival(self, seconds: float) -> float:
        """Logarithm of the chance that a pause lasts for longer than that."""
        index = _class_of(seconds)
        lower = _BOUNDS[index - 1] if index else 0.0
        # The last class has no end; it is as wide as all before it together.
        upper = _BOUNDS[index] if index < len(_BOUNDS) else 2 * lower
        covered = min((seconds - lower) / (upper - lower), 1.0)
        return self._starts[index] + covered * self._steps[index]


class PauseHistory:
    """Pauses between the turns of conversations, per tenant.

    A tenant of whom little is known is taken to be like all others together.
    """

    def __init__(self) -> None:
        self._all = _Pauses()
        self._tenants: OrderedDict[str, _Pauses] = OrderedDict()

    def returned(self, tenant: str, seconds: float) -> None:
        """A conversation's next turn came after that long."""
        for pauses in (self._all, self._of(tenant)):
            pauses.add(pauses.returned, seconds)

    def cut_short(self, tenant: str, seconds: float) -> None:
        """After that long there was no turn, and nobody was looking any more."""
        for pauses in (self._all, self._of(tenant)):
            pauses.add(pauses.cut_short, seconds)

    def outlook(self, tenant: str) -> Outlook:
        """What to expect of this tenant's conversations, as far as is known now."""
        hazards = self._all.hazards([_PRIOR_HAZARD] * _CLASSES)
        if (own := self._tenants.get(tenant)) is not None:
            hazards = own.hazards(hazards)
        return Outlook(hazards)

    def _of(self, tenant: str) -> _Pauses:
        pauses = self._tenants.setdefault(tenant, _Pauses())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _MAX_TENANTS:
            self._tenants.popitem(last=False)
        return pauses


def _class_of(seconds: float) -> int:
    return bisect_right(_BOUNDS, seconds)
