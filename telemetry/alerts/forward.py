"""The measured outputs of one step, in the order in which the modules ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from telemetry.records import Output, StepRecord


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The outputs in forward order, and the type of module that returned each.

    Attributes:
        outputs: The outputs.
        types: Names of the classes of their modules, in the same order.
        owned: Whether their modules own parameters, in the same order.
    """

    outputs: Sequence[Output]
    types: Sequence[str]
    owned: Sequence[bool]

    @staticmethod
    def of(record: StepRecord) -> Forward:
        """The outputs measured at this step."""
        layout = record.layout
        place = {output: layout.position[output.module_name] for output in record.outputs}
        outputs = sorted(place, key=place.__getitem__)
        owners = {parameter.module_name for parameter in layout.parameters}
        return Forward(
            outputs=outputs,
            types=[layout.modules[place[output]].type_name for output in outputs],
            owned=[output.module_name in owners for output in outputs],
        )

    @property
    def hidden(self) -> range:
        """Indices of the outputs that are followed by another module with parameters."""
        last_owner = max((i for i, owned in enumerate(self.owned) if owned), default=0)
        return range(last_owner)
