"""Time and memory: steps that wait for data, memory that grows."""

from __future__ import annotations

from collections import deque
from itertools import combinations
from statistics import fmean, median

from telemetry.alerts import shared
from telemetry.alerts.baseline import Baseline
from telemetry.alerts.detector import Detector, Finding, limit
from telemetry.plain_text import figure
from telemetry.records import RankFacts, StepRecord
from telemetry.tag_names import ALLOCATED_BYTES, HOST_OWN_BYTES, TIMES

_WAIT, _FORWARD, _BACKWARD, _OPTIMIZER = TIMES
_MIB = 2**20


class InputBound(Detector):
    """The median of 50 steps waits for data more than 40 % of its time, and 5 ms or more.

    Evidence: the share, and the seconds of the wait and of the step.
    Causes: decoding and augmentation in the training process, a slow disk or network, few workers.
    Remedies: more ``num_workers``; ``pin_memory``, ``prefetch_factor``, ``persistent_workers``.
    Silent: validation phases, single long waits such as checkpoints, models in compiled graphs,
        waiting for a CPU that other programs use, and for the logger, as in ``flush()``.
    Example: loader = DataLoader(images, batch_size=64)  # num_workers=0

    It resolves below three quarters of the share. Full steps count only where no other was seen. A
    resumed run may be on another machine, so that a checkpoint has none of the times.
    """

    kind = "input_bound"
    severity = "note"
    share: float = limit(0.4, "Share of the step's time.")
    # Chosen manually: index selects of healthy loops take up to a millisecond
    seconds: float = limit(
        0.005, "Least wait per step. Below, the Python code of the loop may take as long."
    )

    def set_up(self) -> None:
        self._full_in_a_row = 0
        # seconds: of the wait for data, of the step
        self._latest = deque[tuple[float, float]](maxlen=shared.LONG)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        if not record.bare_step_s:
            return None
        self._full_in_a_row = self._full_in_a_row + 1 if record.full else 0
        if record.full and self._full_in_a_row < shared.LONG:
            return None
        self._latest.append((record.usage[_WAIT], record.bare_step_s))
        wait_s, step_s = map(median, zip(*self._latest, strict=True))
        share = self._share()
        if len(self._latest) < shared.LONG or share <= self.share or wait_s < self.seconds:
            return None
        return Finding(
            summary=f"Half of the last {shared.LONG} steps waited for data {share:.0%} of their "
            f"time or more ({figure(wait_s)} s of {figure(step_s)} s)",
            cause=slowest_rank(record.ranks),
            advice=(
                "Give the DataLoader more num_workers, with persistent_workers=True",
                "Set pin_memory=True, and copy with non_blocking=True",
                "Raise prefetch_factor if waits are rare and long",
                "Decode and resize once, and store the result",
                "Check what else the loop does between optimizer.step() and the next batch",
            ),
            value=share,
            threshold=self.share,
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return not self._latest or self._share() > shared.MOST * self.share

    def _share(self) -> float:
        return median([wait_s / step_s for wait_s, step_s in self._latest])


def slowest_rank(facts: RankFacts | None) -> str | None:
    """Return which rank the others wait for, and why; None if no part differs by a tenth.

    Ranks wait for each other in the backward pass, so that all have equally long steps. The slowest
    is the one that takes longest in the other parts.
    """
    if facts is None or not facts.usage.keys() >= set(TIMES):
        return None
    spreads = {tag: facts.usage[tag] for tag in (_WAIT, _FORWARD, _OPTIMIZER)}
    tag = max(spreads, key=lambda tag: spreads[tag].high - spreads[tag].low)
    longest, step_s = spreads[tag], sum(facts.usage[tag].high for tag in TIMES)
    if longest.high - longest.low < shared.FEW * step_s:
        return None
    why = "its data" if tag == _WAIT else "its own computing"
    return (
        f"{facts.called(longest.high_rank)} is the slowest, by {why}: {figure(longest.high)} s, "
        f"{facts.called(longest.low_rank)} {figure(longest.low)} s"
    ).capitalize()


class MemoryGrowth(Detector):
    """Memory rises steadily over 300 steps or more, and does not slow down. On a CUDA device, the
    allocated bytes at the end of a step rise by 4 MiB or more. Otherwise the memory of the process
    without mapped files rises by 64 MiB or more and a twentieth.

    Evidence: the rise, and its steps.
    Causes: ``total += loss`` and lists of tensors, which keep graphs; a cache without a limit.
    Remedies: ``total += loss.item()``; ``detach()`` what is kept; limit the cache.
    Silent: the first 50 steps, caches that fill up, longer inputs, data sets that are mapped files.
    Example: total += loss  # keeps the graph of each step

    The lowest values of twenty equal intervals count. Of any two, the later one has to be higher
    nine times in ten (as for Kendall's tau), because allocators keep and return memory. It is a
    note on the host, where a cache that is still being filled looks the same.
    """

    kind = "memory_growth"
    steps: int = limit(300, "Fewest steps of the rise.")
    mebibytes: float = limit(64.0, "Least rise on the host.")
    device_mebibytes: float = limit(4.0, "Least rise on a CUDA device.")

    def set_up(self) -> None:
        self._is_device = False
        self._begin()

    def _begin(self) -> None:
        # of an interval, where steps are dense
        self._width = max(int(self.steps) // shared.LATEST, 1)
        self._first = list[int]()  # step of each interval
        self._lowest, self._tokens = list[float](), list[float]()

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        self._is_device |= ALLOCATED_BYTES in record.usage
        value = record.usage.get(ALLOCATED_BYTES if self._is_device else HOST_OWN_BYTES)
        if baseline.age < shared.LONG:
            self._begin()
        if baseline.age < shared.LONG or value is None:
            return None
        if self._first and 0 <= record.step - self._first[-1] < self._width:
            self._lowest[-1] = min(self._lowest[-1], value)
            return None
        found, low = self._judged(record.step), self._lowest
        if low and max(low) - low[-1] > max((max(low) - low[0]) / 2, self._least):
            self._begin()
        self._first.append(record.step)
        self._lowest.append(value)
        self._tokens.append(record.tokens)
        if len(self._lowest) == 2 * shared.LATEST:
            self._width *= 2
            self._lowest = [*map(min, self._lowest[::2], self._lowest[1::2])]
            self._first, self._tokens = self._first[::2], self._tokens[::2]
        return found

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return len(self._lowest) > shared.LATEST // 2  # no fall since

    @property
    def _least(self) -> float:
        """Bytes of the least rise, and of a fall."""
        return (self.device_mebibytes if self._is_device else self.mebibytes) * _MIB

    def _judged(self, step: int) -> Finding | None:
        """Judge the latest intervals, which end before ``step``."""
        low, tokens = self._lowest[-shared.LATEST :], self._tokens[-shared.LATEST :]
        if len(low) < shared.LATEST:
            return None
        half, quarter = len(low) // 2, len(low) // 4
        rise, late, last = (low[-1] - low[at] for at in (0, half, -1 - quarter))
        rising = fmean([b > a for a, b in combinations(low, 2)])
        least = max(self._least, 0 if self._is_device else low[0] / 20)
        if rise < least or rising < 0.9 or late < rise / 3 or last < rise / 8:
            return None
        if median(tokens[half:]) > 1.05 * median(tokens[:half]):
            return None
        is_device, steps = self._is_device, step - self._first[-shared.LATEST]
        where = "allocated on the device" if is_device else "of the process"
        return Finding(
            summary=f"Memory {where} rose by {rise / _MIB:,.0f} MiB in {steps} steps, "
            f"{figure(rise / steps / 1024)} KiB per step, to {low[-1] / _MIB:,.0f} MiB",
            cause="Something keeps objects of each step",
            advice=(
                "Sum losses as numbers: total += loss.item(), or loss.detach()",
                "detach() tensors that a list, a metric or a hidden state keeps",
                "Evaluate under torch.no_grad()",
                "Limit caches; ignore it if one is still being filled",
            ),
            value=rise,
            threshold=least,
            severity=None if is_device else "note",
        )
