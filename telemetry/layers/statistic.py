"""What a statistic is; :mod:`telemetry.layers.table` lists all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from telemetry.layers.record import LayerRecord


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """One number per layer and step.

    Attributes:
        name: Its name in tags, links and commands.
        title: Its name for people.
        unit: What the numbers count; empty for ratios.
        log: Whether magnitudes matter rather than differences.
        description: One sentence.
        of: Computes the value of a layer; None if it was not measured.
        every_step: Whether it is also known at steps that are not measured in full.
        on_page: Whether the Telemetry page and the commands show it. Then it must not be negative.
        as_curve: Whether each layer has a curve of it in TensorBoard.
        as_spread: Whether its quantiles over all layers are curves there, under ``depth/``.
        zero_is_silent: Whether the curves skip points whose value is zero.
        of_ranks: Whether only a run of several ranks has it.
    """

    name: str
    title: str
    unit: str = ""
    log: bool = True
    description: str
    of: Callable[[LayerRecord], float | None]
    every_step: bool = False
    on_page: bool = True
    as_curve: bool = False
    as_spread: bool = False
    zero_is_silent: bool = False
    of_ranks: bool = False
