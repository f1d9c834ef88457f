"""Numbers in messages are written as people write them."""

from __future__ import annotations

import pytest

from telemetry.plain_text import figure


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.00213, 3, "0.00213"),
        (300.0, 2, "300"),
        (-123.0, 1, "-100"),
        (3_712.0, 2, "3,700"),
        (999_999.0, 2, "1,000,000"),
        (2.04e27, 3, "2.04e27"),
        (3e-7, 1, "3e-7"),
        (float("inf"), 3, "inf"),
    ],
)
def test_a_figure_has_an_exponent_only_far_from_one(value: float, digits: int, text: str) -> None:
    assert figure(value, digits) == text
