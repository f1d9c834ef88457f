"""Selection of the loss among the scalars that a run logs, once, by their tags alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from telemetry.plain_text import printable
from telemetry.tag_names import RUN

_OF_ONE_STEP = ("minibatch", "batch", "iteration", "iter", "step")
_OF_MANY_STEPS = ("epoch", "average", "avg", "mean", "running", "smoothed", "smooth", "ema")
_WORDS = (
    *("training", "train", "total", "overall", "global", "final", "metrics", "logs"),
    *_OF_ONE_STEP,
    *_OF_MANY_STEPS,
)
_WORD = f"(?:{'|'.join(_WORDS)})"
# A regular expression for tags of training losses. Any other word, such as ``val``, ``kl`` or
# ``aux``, excludes a tag.
LOSS_TAGS = rf"(?i)^(?:{_WORD}[\W_]*)*loss(?:es)?(?:[\W_]*{_WORD})*$"
_LOSS_TAG = re.compile(LOSS_TAGS)

# Both chosen manually, in steps: a loss may be logged more rarely than the rest.
_PATIENCE = 100
_SILENCE = 50
_MAX_NAMED = 5


def loss_among(tags: Iterable[str]) -> str | None:
    """Return the tag of the loss, or None.

    ``loss`` is preferred, then a tag that names a single step, then one that does not name a mean
    over many, and among these the shortest.
    """
    return min((tag for tag in tags if _LOSS_TAG.match(tag)), key=_order, default=None)


def loss_of(scalars: Mapping[str, float], tag: str | None) -> float | None:
    """Return the loss among scalars: that of this tag, or without one, the most likely."""
    tag = loss_among(scalars) if tag is None else tag
    return None if tag is None else scalars.get(tag)


def _order(tag: str) -> tuple[bool, bool, bool, int, str]:
    words = tag.lower()
    of_one_step = any(word in words for word in _OF_ONE_STEP)
    of_many = any(word in words for word in _OF_MANY_STEPS)
    return words != "loss", of_many, not of_one_step, len(tag), tag


class LossChoice:
    """Choice of the loss of one run: the best tag of the first step with one, or a given tag.

    Attributes:
        delay: Steps between a batch and its loss: 1 in a loop that logs the loss after the
            optimizer's step, so that the first one came just after the first step.
    """

    def __init__(self, given: str | None = None) -> None:
        self.tag = given  # None: no loss was logged up to now
        self._given = self._settled = given is not None
        self.delay = 0
        self._chosen_at: int | None = None
        self._first_ended: int | None = None
        self._first: int | None = None  # step that ended, or at which others were logged
        self._others: tuple[str, ...] = ()

    def add(self, step: int, tags: Iterable[str]) -> None:
        """Add the tags logged at a step; steps must ascend."""
        if self._chosen_at not in (None, step):
            return
        own = [tag for tag in tags if not tag.startswith(RUN)]
        if not self._settled:
            self.tag = loss_among([*own, self.tag] if self.tag is not None else own)
        if self.tag in own and self._chosen_at is None:
            self._chosen_at, self.delay = step, int(self._first_ended == step - 1)
        if self._chosen_at is None and own:
            self._first = self._first if self._others else step
            self._others = tuple(dict.fromkeys([*self._others, *own]))[: _MAX_NAMED + 1]

    def step_ended(self, step: int) -> None:
        """Note that a step has ended; the losses logged before have been added."""
        if self._first_ended is None:
            self._first_ended = step

    def is_final(self, step: int | None) -> bool:
        """Whether the choice is final after ``step``; None: after the last step."""
        return self._chosen_at is not None and (step is None or step >= self._chosen_at)

    def missing(self, step: int | None) -> str | None:
        """Return a message if no loss was logged up to the end of ``step``; None: the last step.

        None if one was logged, or may still be.
        """
        may_follow = False
        if step is not None:
            self._first = max(step, 0) if self._first is None else self._first
            may_follow = step + 1 < self._first + (_PATIENCE if self._others else _SILENCE)
        if may_follow or self._chosen_at is not None or (step is None and not self._others):
            return None
        if not self._others:
            return (
                f"no loss was logged in {_SILENCE} steps, but most rules need it: "
                "call logger.log(loss=loss) at each step, or use the callback of your trainer in "
                "telemetry.integrations"
            )
        shown = ", ".join(map(printable, self._others[:_MAX_NAMED]))
        shown += ", ..." if len(self._others) > _MAX_NAMED else ""
        if self.tag is not None:
            return f"the loss {printable(self.tag)!r} is not among the logged scalars: {shown}"
        return (
            f"none of the logged scalars is the loss ({shown}), so rules and page have none; "
            'name it: HookLogger(loss_tag="...")'
        )

    def restore(self, tag: object) -> None:
        """Restore the tag of a checkpoint, unless the user has named one."""
        self._chosen_at = self._first_ended = None
        if isinstance(tag, str) and not self._given:
            self.tag, self._settled = tag, True
