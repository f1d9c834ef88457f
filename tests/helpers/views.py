"""Two views of a run: of ``telemetry.read``, and of the page over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import telemetry
from tests.helpers.client import Client
from tests.helpers.known_runs import MISSING


class ReadView:
    """Names of the layers in their order, step and layer of each alert, and numbers."""

    def __init__(self, log_dir: Path) -> None:
        self.run = telemetry.read(log_dir)
        self.layers = list(self.run.modules.module_name)
        self.alerts = [(alert.step, alert.module_name) for alert in self.run.alerts]

    def matrix(self, statistic: str) -> tuple[list[int], NDArray[np.float32]]:
        """Return the steps, and a row of numbers for each: one per layer."""
        rows = self.run.layers[self.run.layers.statistic == statistic]
        steps, places = np.unique(rows.step, return_inverse=True)
        values = np.full((len(steps), len(self.layers)), MISSING, np.float32)
        values[places, rows.module_name.cat.codes] = rows.value
        return steps.tolist(), values


class PageView:
    """A client of the page for one run, ``.`` of its own directory."""

    def __init__(self, client: Client) -> None:
        self.client = client
        run = client.json("run", run=".")
        self.layers = [layer["name"] for layer in run["layers"]]
        self.alerts = [(alert["step"], alert["module_name"]) for alert in run["alerts"]]

    def matrix(self, statistic: str, **window: int) -> tuple[list[int], NDArray[np.float32]]:
        _, arrays = self.client.arrays("matrix", run=".", statistic=statistic, **window)
        return arrays["steps"].tolist(), arrays["values"]


OpenView = Callable[[Path], ReadView | PageView]
