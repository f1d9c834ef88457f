"""How far the loss has risen, and whether that is undone."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Rise:
    """A loss that rose from its usual level.

    Attributes:
        first: What it was in the first steps of the run.
        usual: What it was before it rose.
        peak: The highest since.
    """

    first: float
    usual: float
    peak: float

    def followed_by(self, loss: float) -> Rise:
        """The same after another loss."""
        return self if loss <= self.peak else replace(self, peak=loss)

    def is_undone(self, loss: float) -> bool:
        """Whether this loss is so low that the rise is as good as over.

        That is when half of the rise is undone. Where the loss rose above that of the first steps,
        it is half of the way up to there: to be no worse than an untrained model is no recovery.
        Where it had hardly come down before it rose, it is when it has.
        """
        learned = self.first - self.usual
        if abs(learned) <= _LEARNED * abs(self.first):
            return loss < self.first - _LEARNED * abs(self.first)
        top = min(self.peak, self.first) if learned > 0 else self.peak
        return loss < (self.usual + top) / 2


_LEARNED = 0.03  # of the first loss: less may be noise; as in LossStuck
