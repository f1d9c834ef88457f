"""The page's files: no circle of imports, and colors that color-blind people distinguish."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from itertools import combinations

import numpy as np
import pytest

from tests.helpers.paths import ROOT

STATIC = ROOT / "telemetry" / "tensorboard_plugin" / "static"
IMPORT = re.compile(r'from "\./(\w+\.js)"')
# Machado, Oliveira, Fernandes (2009), severity 1, for linear RGB.
BLINDNESS = {
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
}
LUMINANCE = np.array([0.2126, 0.7152, 0.0722])
PATTERNS = [range(4), range(4, 7), range(7, 10)]
"""Curves with the same dashes."""


def linear(color: str) -> np.ndarray:
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def oklab(color: np.ndarray) -> np.ndarray:
    """Björn Ottosson's space, in which a distance of 0.02 can just be seen."""
    to_lms = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
    to_lab = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    return np.array(to_lab) @ np.cbrt(np.clip(np.array(to_lms) @ color, 0, None))


def test_static_files_do_not_import_each_other_in_a_circle() -> None:
    files = STATIC.glob("*.js")
    imports = {file.name: IMPORT.findall(file.read_text(encoding="utf-8")) for file in files}
    assert sum(map(len, imports.values())) > 50
    list(TopologicalSorter(imports).static_order())


@pytest.mark.parametrize("dark", [False, True])
def test_curves_are_distinguishable_by_color_blind_people_and_in_gray(dark: bool) -> None:
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    style = style.partition(":root.dark {")[2 if dark else 0]
    colors = [linear(c) for c in re.findall(r"--curve\d+: (#\w{6});", style)][:10]
    assert len(colors) == 10
    gray = [oklab(np.full(3, LUMINANCE @ color))[0] for color in colors]
    for one, other in combinations(range(10), 2):
        has_same_dashes = any({one, other} <= set(pattern) for pattern in PATTERNS)
        for matrix in (np.eye(3), *map(np.array, BLINDNESS.values())):
            seen = [oklab(np.clip(matrix @ colors[i], 0, 1)) for i in (one, other)]
            assert np.linalg.norm(seen[0] - seen[1]) > (0.14 if has_same_dashes else 0.05)
        assert not has_same_dashes or abs(gray[one] - gray[other]) > 0.09
