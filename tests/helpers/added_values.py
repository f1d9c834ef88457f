"""Values that a written run or an alert gets in addition."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from telemetry.alert import Consequence
from telemetry.events import summaries
from telemetry.writing import hparams as hyperparameters
from tests.helpers.event_writer import EventWriter


def add_values(
    log_dir: Path,
    *,
    hparams: Mapping[str, Any] | None = None,
    scalars: Mapping[str, Mapping[int, float]] | None = None,
) -> None:
    """Add hyperparameters, and curves as values by step."""
    writer = EventWriter(log_dir)
    if hparams:
        writer.write_values(hyperparameters.values_of(hparams, ["loss"]), 0)
    for tag, curve in (scalars or {}).items():
        for step, value in curve.items():
            writer.write_values([summaries.scalar(tag, value)], step)
    writer.close()


def consequence(kind: str, module_name: str) -> Consequence:
    """A fault that an alert caused, for ``alert_at(consequences=...)``."""
    return Consequence(kind=kind, module_name=module_name)
