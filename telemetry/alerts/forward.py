"""The measured outputs of one step, in the order in which the modules ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from telemetry.records import StepRecord


def module_of(output_name: str) -> str:
    """The module that an output belongs to: ``rnn[1]`` is another output of ``rnn``."""
    return output_name.partition("[")[0]


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Names of the outputs in forward order, and what kind of module gave each.

    Attributes:
        names: Of the outputs.
        types: Names of the classes of their modules, in the same order.
        owned: Whether their modules own parameters, in the same order.
    """

    names: Sequence[str]
    types: Sequence[str]
    owned: Sequence[bool]

    @staticmethod
    def of(record: StepRecord) -> Forward:
        """The outputs measured at this step."""
        layout = record.layout
        place = {name: layout.position[module_of(name)] for name in record.activations}
        names = sorted(place, key=place.__getitem__)
        owners = {parameter.module_name for parameter in layout.parameters}
        return Forward(
            names=names,
            types=[layout.modules[place[name]].type_name for name in names],
            owned=[module_of(name) in owners for name in names],
        )

    @property
    def hidden(self) -> range:
        """Indices of the outputs that another module with parameters comes after."""
        last_owner = max((i for i, owned in enumerate(self.owned) if owned), default=0)
        return range(last_owner)
