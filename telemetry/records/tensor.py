"""Records of a tensor (histogram, moments, extremes of units) and of attention during one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, zip_longest
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from telemetry.records.rows import Rows
from telemetry.records.sketch import Sketch
from telemetry.threads import without_locks

Name = TypeVar("Name")


class Output(NamedTuple):
    """One of the tensors that a module returned.

    The string is ``rnn`` for the first and ``rnn[1]`` for the second. It must not be parsed:
    a module may be called ``rnn[1]``, too.

    Attributes:
        module_name: Name in ``named_modules()``.
        place: Index of the tensor among those returned, from 0.
    """

    module_name: str
    place: int = 0

    def __str__(self) -> str:
        return f"{self.module_name}[{self.place}]" if self.place else self.module_name


@without_locks
class TensorRecord:
    """Record of one tensor during one step; all its calls and micro-batches are merged."""

    def __init__(
        self,
        *,
        sketch: Sketch,
        calls: int = 1,
        unit_min: NDArray[np.float32] | None = None,
        unit_max: NDArray[np.float32] | None = None,
    ) -> None:
        known = unit_min is not None and unit_max is not None
        units = np.stack([unit_min, unit_max], axis=1) if known else None  # type: ignore[list-item]
        self.rows, self.row = Rows.of([sketch], [calls], [units]), 0

    @staticmethod
    def of_row(rows: Rows, row: int) -> TensorRecord:
        """Return the record of one row."""
        record = TensorRecord.__new__(TensorRecord)
        record.rows, record.row = rows, row
        return record

    @cached_property
    def sketch(self) -> Sketch:
        """Histogram and moments of all elements; exact ones, unless :attr:`estimated`."""
        return Sketch.of_row(self.rows, self.row)

    @property
    def calls(self) -> int:
        """Number of calls in this step; of very many, only the first few are measured."""
        return int(self.rows.calls[self.row])

    @property
    def estimated(self) -> bool:
        """Whether zeros, NaN and infinities were counted in a sample, as on an accelerator.

        The kurtosis is then that of the sample, too. Whether there is any NaN or infinity is exact.
        """
        return bool(self.rows.estimated[self.row])

    @property
    def unit_min(self) -> NDArray[np.float32] | None:
        """Smallest value of each unit or channel, float32 ``[units]``; NaN where the unit has one.

        None if the tensor has no units.
        """
        units = self.rows.units_of(self.row)
        return None if units is None else units[:, 0]

    @property
    def unit_max(self) -> NDArray[np.float32] | None:
        """Largest value of each unit, like :attr:`unit_min`."""
        units = self.rows.units_of(self.row)
        return None if units is None else units[:, 1]

    @property
    def zero_units(self) -> NDArray[np.bool_] | None:
        """Whether each unit was always zero; None if the tensor has no units."""
        units = self.rows.units_of(self.row)
        return None if units is None else (units == 0).all(axis=1)

    @property
    def dead_fraction(self) -> float:
        """Share of units that were always zero; NaN if the tensor has no units."""
        return float(self.rows.dead_fraction[self.row])

    @property
    def variation(self) -> float:
        """See :attr:`telemetry.records.rows.Rows.variation`."""
        return float(self.rows.variation[self.row])


def figures_of(
    tensors: Mapping[Name, TensorRecord], formula: Callable[[Rows], NDArray[Any]]
) -> dict[Name, float]:
    """Return a figure of each tensor by its name; ``formula`` computes it for all rows."""
    return dict(zip(tensors, formula(Tensors.of(tensors).rows).tolist(), strict=True))


def bad_among(tensors: Mapping[Name, TensorRecord]) -> list[Name]:
    """Return the names of tensors with NaN or ``+inf``; masks contain ``-inf``."""
    if not tensors:  # as at most steps
        return []
    rows = Tensors.of(tensors).rows
    return [*compress(tensors, rows.nan_count + rows.positive_inf_count)]


class Tensors(Mapping[Name, TensorRecord]):
    """Rows of one kind of tensors by name; records are made on access."""

    def __init__(self, names: Sequence[Name], rows: Rows) -> None:
        self.rows = rows  # in the order of the names
        self._rows = {name: row for row, name in enumerate(names)}
        self._records: dict[Name, TensorRecord] = {}

    @staticmethod
    def of(records: Mapping[Any, TensorRecord]) -> Tensors[Any]:
        """Return the same tensors as rows."""
        if isinstance(records, Tensors):
            return records
        parts = [record.rows.take(np.array([record.row])) for record in records.values()]
        return Tensors(tuple(records), Rows.concatenate([Rows.of(()), *parts]))

    def only(self, names: Collection[Name]) -> Tensors[Name]:
        """Return the tensors with one of these names."""
        rows_of = {name: row for name, row in self._rows.items() if name in names}
        return Tensors([*rows_of], self.rows.take(np.array([*rows_of.values()], np.intp)))

    def __getitem__(self, name: Name) -> TensorRecord:
        if name not in self._records:
            self._records[name] = TensorRecord.of_row(self.rows, self._rows[name])
        return self._records[name]

    def __iter__(self) -> Iterator[Name]:
        return iter(self._rows)

    def __reversed__(self) -> Iterator[Name]:
        return reversed(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(frozen=True, eq=False)
class AttentionHeads:
    """Attention of one module at one step, where it calls ``scaled_dot_product_attention``.

    At most 64 queries of the first sample of each call are measured, with all their keys.

    Attributes:
        logit_max: Largest logit of each head, float64 ``[heads]``: as the softmax receives it, of
            the keys to which a query may attend.
        entropy: Mean entropy of the weights of a query, as a share of ``ln n`` for ``n`` keys,
            same dtype and shape; NaN if no query may attend to more than one.
    """

    logit_max: NDArray[np.float64]
    entropy: NDArray[np.float64]

    @staticmethod
    def merged(parts: Sequence[AttentionHeads]) -> AttentionHeads:
        """Return the largest logits and the mean entropies of several calls or ranks."""
        logits = [*zip_longest(*[part.logit_max for part in parts], fillvalue=-math.inf)]
        entropies = np.array([*zip_longest(*[part.entropy for part in parts], fillvalue=math.nan)])
        known = ~np.isnan(entropies)  # [heads, parts]
        with np.errstate(invalid="ignore"):
            mean = np.where(known, entropies, 0.0).sum(axis=1) / known.sum(axis=1)
        return AttentionHeads(np.array(logits).max(axis=1), mean)
