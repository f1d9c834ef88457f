"""Whether the loss rises or falls, compared with what it was some time ago."""

from __future__ import annotations

import math
from collections import deque

from telemetry.alerts.history import History, median
from telemetry.alerts.past import Past


class LossTrend:
    """Whether the loss rises or falls. It may have any unit and sign.

    Three comparisons, from fast to slow:

    - Each loss with the hundred that lie more than twenty steps back (in the first steps, with the
      older half of all): with those just before it, a loss that rises step by step would raise its
      own limit.
    - The last five with the thirty before. While they are worse, the thirty are kept unchanged, for
      at most a hundred steps.
    - The last five with the best five and the first five: has half of what was learned been lost?
      However slowly the loss rises, it comes to that.

    Attributes:
        is_worse: Whether its recent median is four standard deviations above its past.
        is_better: Whether that is half a standard deviation below its past.
        is_recovering: Whether it is worse, but has fallen again by a fifth of its rise.
        steps_far_above: Number of losses in a row that were far above each of the past hundred.
        excess: By how many times its magnitude the last loss exceeds the highest of the past.
        steps_lost: Number of losses in a row after which half of what was learned had been lost.
    """

    is_worse: bool
    is_better: bool
    is_recovering: bool
    steps_far_above: int
    excess: float
    steps_lost: int
    _first: tuple[float, ...]
    _best: float
    _recent: deque[float]
    _past: History
    _steps_worse: int
    _peak: float
    _long_ago: Past

    def __init__(self) -> None:
        self.is_worse = False
        self.is_better = False
        self.is_recovering = False
        self.steps_far_above = 0
        self.excess = 0.0
        self.steps_lost = 0
        self._first = ()
        self._best = math.inf
        self._recent = deque(maxlen=_RECENT)
        self._past = History(_PAST)
        self._steps_worse = 0
        self._peak = 0.0
        self._long_ago = Past(_LATEST)

    @property
    def first(self) -> float:
        """Median of the first five losses that were not far above; there must be one."""
        return median(self._first)

    @property
    def usual(self) -> float:
        """Median of the past; there must be one loss."""
        return self._long_ago.median

    @property
    def is_unbounded(self) -> bool:
        """Whether it is so far below zero that nothing seems to limit it: ten first losses."""
        return bool(self._first) and median(self._recent) < -_UNBOUNDED * abs(self.first)

    @property
    def has_lost(self) -> bool:
        """Whether half of what was learned is lost for certain."""
        return self.steps_lost >= _RECENT

    @property
    def has_just_lost(self) -> bool:
        """Whether that is so since this loss."""
        return self.steps_lost == _RECENT

    def add(self, loss: float) -> None:
        """Add the finite loss of one step."""
        if len(self._recent) == _RECENT and not 0 < self._steps_worse <= _PATIENCE:
            self._past.add(self._recent[0])
        self._recent.append(loss)
        recent = median(self._recent)
        if len(self._past) >= _RECENT:
            self._compare(recent)
        self._compare_with_best(recent)
        self._compare_with_past(loss)
        self._remember(loss)

    def _compare(self, recent: float) -> None:
        usual = self._past.median
        spread = max(self._past.spread, _LEAST_SPREAD * abs(usual))
        self.is_worse = recent > usual + _WORSE * spread
        self.is_better = recent < usual - _BETTER * spread
        self._steps_worse = self._steps_worse + 1 if self.is_worse else 0
        self._peak = max(self._peak, recent) if self._steps_worse > 1 else recent
        self.is_recovering = self.is_worse and recent < self._peak - _RECOVERED * (
            self._peak - usual
        )

    def _compare_with_best(self, recent: float) -> None:
        if len(self._recent) < _RECENT or not self._first:
            return
        self._best = min(self._best, recent)
        first = self.first
        has_learned = first - self._best > _LEARNED * abs(first)
        is_lost = has_learned and recent > (first + self._best) / 2
        self.steps_lost = self.steps_lost + 1 if is_lost else 0

    def _compare_with_past(self, loss: float) -> None:
        if not self._long_ago:
            return
        highest, lowest = self._long_ago.highest, self._long_ago.lowest
        few = _FAR_OF_FEW * abs(highest) if len(self._long_ago) < _FEW else 0.0
        is_far_above = loss > highest + max(_FAR * (highest - lowest), few)
        self.steps_far_above = self.steps_far_above + 1 if is_far_above else 0
        self.excess = (loss - highest) / abs(highest) if highest else 0.0

    def _remember(self, loss: float) -> None:
        if len(self._first) < _RECENT and not self.steps_far_above:
            self._first = (*self._first, loss)
        if self.steps_far_above > _OUTLIERS:  # it is how things are now
            self._long_ago.adopt(loss)
        elif self.steps_far_above == 0:
            self._long_ago.add(loss)


_RECENT = 5  # a median of 5 ignores two outliers; tried 2 and 10
_PAST = 30  # by eye, in steps; tried 15 and 60
_LATEST = 20  # steps; as _BETWEEN of NormTrend
_LEARNED = 0.1  # of the first loss: less may be noise; by eye
_LEAST_SPREAD = 1e-3  # so that a constant loss has one, too; tried 0.0005 and 0.002
# A normally distributed loss exceeds this once in 30,000 steps. At 0.8 the vanishing
# mlp_tanh20_small is called exploding; tried 2 and 20.
_WORSE = 4.0
_BETTER = 0.5  # by eye; tried 0.25 and 1
_RECOVERED = 0.2  # by eye; tried 0.1 and 0.4
_FAR = 0.5  # of the range of the losses so far, by eye; tried 0.1 and 2.5
_FAR_OF_FEW = 0.2  # of the highest loss, while the range says little; by eye; tried 0.1 and 0.4
_FEW = 10  # losses whose range says little, as _FEWEST of Past
_PATIENCE = 100  # by eye, in steps; tried 50 and 200
_UNBOUNDED = 10.0  # by eye
_OUTLIERS = 20  # by eye, in losses; tried 10 and 40
