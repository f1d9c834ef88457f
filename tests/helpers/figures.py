"""Numbers in texts, so that tests compare figures and not sentences."""

from __future__ import annotations

import re


def figures(text: str | None) -> list[float]:
    """Return the numbers in a text without their signs and commas of thousands, in order."""
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", text or "")
    return [float(n) for n in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?", plain)]
