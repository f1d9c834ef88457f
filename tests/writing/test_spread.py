"""A few curves tell how a statistic is spread over the depth."""

from __future__ import annotations

import numpy as np
import pytest
from serialized import summary_of
from small_records import full_record, tensor

from telemetry.records import Output
from telemetry.writing import spread


def curves(**changes: object) -> dict[str, float]:
    values = summary_of(spread.values_of(full_record(0, **changes))).value
    return {value.tag: value.simple_value for value in values}


def test_quantiles_are_taken_over_all_layers() -> None:
    found = curves()
    for name, share in spread.QUANTILES.items():
        expected = np.quantile([0, 1, 2, 3], share)  # log10 of 1, 10, 100, 1000
        assert found[f"~run/depth/log10_grad_norm/{name}"] == pytest.approx(expected)
    assert found["~run/depth/log10_update_ratio/median"] == pytest.approx(-3)
    assert found["~run/depth/dead_units/p95"] == 0.25
    assert len(found) == 12


def test_what_is_not_finite_is_left_out() -> None:
    norms = np.array([100.0, np.nan, np.inf, 0.0])
    assert curves(grad_norms=norms)["~run/depth/log10_grad_norm/median"] == 2
    assert "~run/depth/log10_grad_norm/median" not in curves(grad_norms=np.full(4, np.nan))
    assert "~run/depth/dead_units/p05" not in curves(outputs={})


@pytest.mark.parametrize("changes", [{"full": False}, {"phase": "validation"}, {"skipped": True}])
def test_other_steps_have_no_curves(changes: dict[str, object]) -> None:
    assert curves(**changes) == {}


def test_the_record_is_not_needed_in_full() -> None:
    found = curves(outputs={Output("layer0"): tensor(2)}, update_ratios={})
    assert "~run/depth/log10_update_ratio/median" not in found
    assert found["~run/depth/log10_activation_rms/median"] > 0
