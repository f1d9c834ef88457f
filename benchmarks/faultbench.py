"""Scores the alerts of HookLogger with faultbench.

    python benchmarks/faultbench.py [--cases DIR] [--seed N] [--verbose] [--verify-online]

The benchmark itself (runs with known faults, their healthy twins, the score) must be in
``../shared/faultbench`` and defines all arguments. If it is missing, this prints a message.
``--cases`` takes any folder whose ``cases.py`` lists such runs.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from telemetry import Alert, HookLogger

HOME = Path(__file__).resolve().parents[2] / "shared" / "faultbench"
HOMES = {"faultbench": HOME, "released": HOME / "released"}
"""Folders with cases, by the name of the bench."""

KINDS = {
    "exploding_gradient": "exploding",
    "exploding_activation": "exploding",
    "vanishing_gradient": "vanishing",
    "nonfinite": "nonfinite",
    "dead_units": "dead",
    "saturated_units": "saturated",
    "loss_divergence": "lr",
    "loss_spike": "lr",
    "no_learning": "no_learning",
    "learning_rate_zero": "no_learning",
    "untrained_parameters": "no_learning",
}
"""Maps our kinds to those of faultbench; it has none for the others."""


class Adapter:
    """One run with a logger: norms at every step, full measurements at every tenth."""

    name = "telemetry"

    def attach(self, model: nn.Module, optimizer: Optimizer, case_info: dict[str, Any]) -> None:
        logging.getLogger("telemetry").setLevel(logging.CRITICAL)
        self._folder = tempfile.TemporaryDirectory()
        self._found: list[dict[str, Any]] = []
        self._step = 0
        self._logger = HookLogger(
            model, self._folder.name, every_n_steps=10, measure="!images", on_alert=self._note
        )

    def after_backward(self, step: int, loss: float) -> None:
        self._step = step
        self._logger.log(loss=loss)

    def after_step(self, step: int, loss: float) -> None:
        # Wait for the rules before the next step begins, so that runs are reproducible.
        self._logger.flush()

    def finish(self) -> list[dict[str, Any]]:
        self._logger.close()
        self._folder.cleanup()
        return self._found

    def _note(self, alert: Alert) -> None:
        if alert.stage != "resolved" and alert.severity != "note" and alert.kind in KINDS:
            self._found.append(
                {"step": self._step, "kind": KINDS[alert.kind], "layer": alert.module_name}
            )


def load_faultbench() -> ModuleType | None:
    """The benchmark's own module; None if it is not installed."""
    path = HOME / "faultbench.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location("faultbench", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["faultbench"] = module  # its cases import it by this name
    spec.loader.exec_module(module)
    return module


def main() -> None:
    faultbench = load_faultbench()
    if faultbench is None:
        print(f"skipped: {HOME} is not there, and the benchmark's runs are in it")
        return
    sys.argv = [sys.argv[0], "--detector", str(Path(__file__).resolve()), *sys.argv[1:]]
    faultbench.main()


if __name__ == "__main__":
    main()
