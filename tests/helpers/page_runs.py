"""Runs for the tests of the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.helpers.known_runs import COLUMN, MISSING, alert_at, layout_of, write_run

HOSTILE = "<img src=x onerror=window.hacked=1>"
DARKEST, LIGHTEST = "#440154", "#fde725"  # viridis
NAN, INFINITE = {"#d5006d", "#ff7ac0"}, {"#ff5a00", "#7a1f00"}
COLORS = ["low", "high", "zero", "infinite", "nan", "missing"]
NAMES = ["stem", "blocks.0.fc", "blocks.0.act", "blocks.1.fc", "blocks.1.act", "head"]


def rising(step: int) -> np.ndarray:
    """Layer i has 10^i at every step."""
    return np.float32(10.0) ** np.arange(6, dtype=np.float32) * np.float32(1 + step / 1000)


def matrices(step: int) -> np.ndarray:
    values = np.repeat(rising(step)[:, None], len(COLUMN), axis=1) / 1e5
    values[[2, 4], COLUMN["update_ratio"]] = MISSING
    return values


def growing(step: int) -> np.ndarray:
    """One unit that is dead from step 20 on, one that grows, one that does not."""
    return np.array([[0, 0 if step >= 20 else 1], [-step, step], [-1, 2]], np.float32)


def exploding(step: int) -> np.ndarray:
    """Two ordinary layers, 100 apart; the third grows by 30 decades."""
    return np.array([0.01, 1, 10.0 ** (step / 2)], np.float32)


def apart(step: int) -> np.ndarray:
    """All alike; at step 9, one layer is 1,000 times smaller and another 10 times larger."""
    return np.array([1e-3, MISSING, 10, 1] if step == 9 else [1, MISSING, 1, 1], np.float32)


def of_roles(step: int) -> np.ndarray:
    """Norms a thousand times below linear layers; from step 5 on, one is at 100 times its own."""
    norms = np.tile(np.float32([1e-3, 1]), 3)
    norms[2] *= 100 if step >= 5 else 1
    return np.append(norms, np.float32(MISSING))


def write_runs(logdir: Path) -> None:
    names = ["group.small", "group.act", "group.large", "head"]
    write_run(logdir / "apart", layout_of(names), steps=range(10), norms=apart)
    roles = [f"blocks.{i}.{role}" for i in range(3) for role in ("norm", "fc")]
    write_run(logdir / "roles", layout_of([*roles, "frozen"]), steps=range(10), norms=of_roles)
    write_run(
        logdir / "demo", layout_of(NAMES), steps=range(60), norms=rising, matrices=matrices,
        units=growing, every=10,
        alerts=[
            alert_at(7, "blocks.0.fc", severity="warning", kind="vanishing_gradient"),
            alert_at(30, "head", summary="The gradient of head exploded."),
        ],
    )  # fmt: skip
    special = np.array([1, 1e6, 0, np.inf, np.nan, MISSING], np.float32)
    for name, norms in (("colors", special), ("sound", np.ones(6, np.float32))):
        write_run(
            logdir / name, layout_of(COLORS), steps=range(10), norms=lambda _, norms=norms: norms
        )  # fmt: skip
    write_run(
        logdir / "explosion", layout_of(["a", "b", "transformer.blocks.10.attention.projection"]),
        steps=range(60), norms=exploding,
    )  # fmt: skip
    write_run(
        logdir / HOSTILE, layout_of([HOSTILE, "plain"]), steps=range(5),
        norms=lambda s: np.ones(2, np.float32),
        alerts=[alert_at(2, HOSTILE, summary=HOSTILE, kind=HOSTILE, follows=[(HOSTILE, HOSTILE)])],
    )  # fmt: skip
