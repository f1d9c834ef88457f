"""Observations of one step: taken on the training thread, merged into fields on the worker.

They are measured tensors, by kind and name, and copies of other values, by field.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from torch import Tensor

from telemetry.capture.parameters import PLAIN, Indexed, local
from telemetry.failures import Failures
from telemetry.measure import Measurements, images
from telemetry.records import AttentionHeads, Output, Parameter
from telemetry.records.tensor import Tensors
from telemetry.torch_private.host_copy import HostCopy

# Bounds of one step: beyond so many observations, only the first calls of each tensor are
# measured, and further ones are counted.
MANY_OBSERVATIONS = 8192
FEW_CALLS = 4

Kind = Literal[
    "inputs", "channels", "outputs", "output_grads", "grads", "weights", "second_moments"
]
"""Field of the :class:`StepRecord` that holds the tensor."""

Name: TypeAlias = str | Output
"""Name of a parameter or module, or an output."""

# Powers of the values that are summed: four where the kurtosis is shown, elsewhere two.
_POWERS: Mapping[Kind, int] = {"inputs": 4, "outputs": 4}

_NO_TENSORS: Tensors[Any] = Tensors.of({})


def _number_or_array(values: Sequence[Tensor]) -> Any:
    return values[0].numpy() if values[0].dim() else values[0].item()


# Conversions of the copies of a field that is neither one number nor one array.
_CONVERTED: Mapping[str, Callable[[list[Tensor]], Any]] = {
    "attention": lambda calls: AttentionHeads.merged(
        [AttentionHeads(*call.double().numpy()) for call in calls]
    ),
    "feature_maps": lambda samples: images.feature_map_grid(samples[0]),
    "filters": lambda samples: images.filter_grid(samples[0]),
    "input": lambda samples: images.input_grid(samples[0]),
    "fingerprints": lambda numbers: tuple([float(number) for number in numbers]),
}


class Observation(NamedTuple):
    """One measured tensor; ``scaled``: with the factor of a ``GradScaler``, if there is one."""

    kind: Kind
    name: Name
    measurement: int
    scaled: bool


class Observations:
    """Measured tensors and copied values of one step.

    Tensors are added to :attr:`all`, or to the list of a backward pass that may belong to no step.
    """

    def __init__(self, failures: Failures) -> None:
        self.all: list[Observation] = []
        self._failures = failures
        self._measurements = Measurements()
        self._added: list[Observation] = []  # of all backward passes
        self._calls: Counter[tuple[Kind, Name]] = Counter()
        # By the field of the record and the key in it; None: the field itself.
        self._copies: dict[tuple[str, str | None], list[HostCopy]] = {}
        self._counted: Counter[tuple[Kind, Name]] = Counter()  # calls that were not measured

    # --- on the training thread -------------------------------------------------------------------

    def add(
        self,
        kind: Kind,
        name: Name,
        tensor: Tensor,
        into: list[Observation] | None = None,
        *,
        unit_axis: int | None = None,
        scaled: bool = False,
    ) -> Observation | None:
        """Measure ``tensor`` as it is now; None if it is only counted, or cannot be measured.

        Of a DTensor, it measures the values in this process. The observation is added to ``into``,
        by default to :attr:`all`.
        """
        self._calls[kind, name] += 1
        if len(self._added) >= MANY_OBSERVATIONS and self._calls[kind, name] > FEW_CALLS:
            self._counted[kind, name] += 1
            return None
        values = [tensor if type(tensor) in PLAIN else local(tensor)]
        powers = _POWERS.get(kind, 2)
        [measured] = self._measurements.add_all(values, unit_axis=unit_axis, powers=powers)
        if measured is None:
            self._log_unsupported(kind, name, tensor)
            return None
        observation = Observation(kind, name, measured, scaled)
        self._added.append(observation)
        (self.all if into is None else into).append(observation)
        return observation

    def add_parameters(
        self,
        kind: Kind,
        tensors: Indexed,
        parameters: Sequence[Parameter],
        *,
        scaled: bool = False,
    ) -> None:
        """Measure tensors of some of the model's ``parameters``, given with their indices."""
        values = [t if type(t) in PLAIN else local(t) for _, t in tensors]
        measured = self._measurements.add_all(values, powers=_POWERS.get(kind, 2))
        for (index, _), value, measurement in zip(tensors, values, measured, strict=True):
            name = parameters[index].name
            if measurement is None:
                self._log_unsupported(kind, name, value)
                continue
            self._added.append(Observation(kind, name, measurement, scaled))
            self.all.append(self._added[-1])

    def copies(self, field: str, key: str | None = None) -> list[HostCopy]:
        """Return the list of the copied values of a field, or of a key in it."""
        return self._copies.setdefault((field, key), [])

    def take_picture(self, field: str, key: str | None, samples: Iterator[Tensor | None]) -> None:
        """Copy the first of the samples for a field of pictures, unless it has one."""
        if (field, key) not in self._copies and (sample := next(samples, None)) is not None:
            self.copies(field, key).append(HostCopy(sample))

    def finish(self) -> None:
        """Start the copies to the host; nothing is added any more."""
        self._measurements.finish()

    def _log_unsupported(self, kind: Kind, name: Name, tensor: Tensor) -> None:
        layout = "nested tensor" if tensor.is_nested else type(tensor).__name__
        what = f"{layout} of {tensor.dtype} ({tensor.layout}, {tensor.device.type})"
        self._failures.log_once(
            f"{kind} of {str(name) or 'the model'} are not measured: {what} is not supported",
            kind=what,
        )

    # --- on the worker thread ---------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Host memory of the observations, about."""
        copied = sum([copy.nbytes for some in self._copies.values() for copy in some])
        return self._measurements.nbytes + copied

    def copied(self) -> dict[str, Any]:
        """Return the copied values as fields; waits for an accelerator."""
        fields: defaultdict[str, Any] = defaultdict(dict)
        for (field, key), copies in self._copies.items():
            with self._failures.contained(f"to read {field}"):
                values = [copy.wait() for copy in copies]
                value = _CONVERTED.get(field, _number_or_array)(values)
                if key is None:
                    fields[field] = value
                else:
                    fields[field][key] = value
        return fields

    def tensors(self, *, first: int, factor: float) -> dict[str, Tensors[Any]]:
        """Merge the measured tensors by kind and name; waits for an accelerator.

        Args:
            first: Number of observations to omit, from the beginning.
            factor: Divisor of those that are scaled.
        """
        kinds: dict[str, Tensors[Any]] = dict.fromkeys(get_args(Kind), _NO_TENSORS)
        if not self._added:
            return kinds
        observations = self.all[first:]
        measured = self._measurements.reduce().rows
        rows = measured.take(np.array([o.measurement for o in observations], np.intp))
        if factor != 1:
            scaled = np.array([o.scaled for o in observations])
            rows = rows.scaled(np.where(scaled, 1 / factor, 1.0))
        places: dict[tuple[Kind, Name], int] = {}
        of = [places.setdefault((o.kind, o.name), len(places)) for o in observations]
        rows = rows.merged(np.array(of, np.int64), len(places))
        if self._counted:
            rows = rows.having(calls=rows.calls + [self._counted[key] for key in places])
        for kind in {kind for kind, _ in places}:
            some = {name: place for (of_kind, name), place in places.items() if of_kind == kind}
            kinds[kind] = Tensors(tuple(some), rows.take(np.array([*some.values()], np.intp)))
        return kinds
