"""Several runs to choose from, one of which fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.known_runs import alert_at, layout_of, write_run

HOSTILE = 'a<b>&"\x01, c'
LAYERS = ["embed"] + [f"blocks.{i}.{name}" for i in range(3) for name in ("attn.qkv", "fc1")]
BLOCKS = [*LAYERS, "blocks.2.norm", "head"]
BOOM = 100
"""The gradient of the last layer but one leaves its past four steps before; it is NaN from here on,
everything is so from three steps later on."""


def exploding(step: int) -> np.ndarray:
    noise = np.random.default_rng(step).uniform(0.9, 1.1, len(BLOCKS)).astype(np.float32)
    if step >= BOOM - 4:
        noise[-2] *= 100
    if step >= BOOM - 2:
        noise[:] *= 10
    if step >= BOOM:
        noise[-2] = np.nan
    if step >= BOOM + 3:
        noise[:] = np.nan
    return noise


def write_story(logdir: Path) -> None:
    """``boom``, the newest run; ``old9`` and ``old10``; all with hyperparameters."""
    write_run(
        logdir / "boom", layout_of(BLOCKS), steps=range(400), norms=exploding,
        end=RuntimeError(), time_of=lambda step: 1772323200 + step, **tuning(0.5),
        alerts=[
            alert_at(20, "head", severity="note", kind="attention_collapse", summary="A note."),
            alert_at(BOOM - 2, "blocks.2.norm", summary="The gradient exploded."),
            alert_at(BOOM, "blocks.2.norm", kind="nonfinite", summary="It is NaN."),
        ],
    )  # fmt: skip
    for name, norm, tuned in (("old9", 2, tuning(0.01)), ("old10", 1, {})):
        write_run(
            logdir / name, layout_of([HOSTILE, "b"]), steps=range(30),
            norms=lambda _, norm=norm: np.full(2, norm, np.float32),
            time_of=lambda step: 1.77e9 + step, **tuned,
        )  # fmt: skip


def tuning(rate: float) -> dict[str, Any]:
    """Hyperparameters with this rate, and a metric."""
    betas = {f"beta{i}": rate + i for i in range(8)}
    return {
        "hparams": {**betas, "lr": rate, "depth": 3},
        "logged": {"val/accuracy": {0: 1 - rate}},
    }
