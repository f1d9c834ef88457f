"""Copies of values that hooks have read, for fields of the record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from telemetry.failures import Failures
from telemetry.measure import images
from telemetry.records import AttentionHeads
from telemetry.torch_private.host_copy import HostCopy

# Conversions of the copies of a field; of the others one array.
_CONVERTED: Mapping[str, Callable[[list[Tensor]], Any]] = {
    "attention": lambda calls: AttentionHeads.merged(
        [AttentionHeads(*call.double().numpy()) for call in calls]
    ),
    "feature_maps": lambda samples: images.feature_map_grid(samples[0]),
    "filters": lambda samples: images.filter_grid(samples[0]),
    "input": lambda samples: images.input_grid(samples[0]),
    "fingerprints": lambda numbers: tuple([float(number) for number in numbers]),
}


class Copies:
    """Copies for fields of one step's record, by name and the key in it; None: the field itself."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str | None], list[HostCopy]] = {}

    def of(self, name: str, key: str | None = None) -> list[HostCopy]:
        """Return the list of the copies for a field."""
        return self._copies.setdefault((name, key), [])

    def take_picture(self, name: str, key: str | None, samples: Iterator[Tensor | None]) -> None:
        """Copy the first of the samples for a field of pictures, unless it has one."""
        if (name, key) not in self._copies and (sample := next(samples, None)) is not None:
            self.of(name, key).append(HostCopy(sample))

    @property
    def nbytes(self) -> int:
        """Host memory of the values."""
        return sum([copy.nbytes for some in self._copies.values() for copy in some])

    def fields(self, failures: Failures) -> dict[str, Any]:
        """Return the values of the fields; waits for an accelerator."""
        fields: defaultdict[str, Any] = defaultdict(dict)
        for (name, key), copies in self._copies.items():
            with failures.contained(f"to read {name}"):
                values = [copy.wait() for copy in copies]
                value = _CONVERTED[name](values) if name in _CONVERTED else values[0].numpy()
                if key is None:
                    fields[name] = value
                else:
                    fields[name][key] = value
        return fields
