"""Properties of records."""

from __future__ import annotations

import numpy as np
import pytest

from telemetry import Layout, Module, Parameter, StepRecord

MODULES = tuple(Module(name=name, type_name="Linear") for name in ("first", "relu", "last"))
PARAMETERS = tuple(
    Parameter(name=f"{module}.{name}", module_name=module, shape=(2,))
    for module in ("first", "last")
    for name in ("weight", "bias")
)


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([3.0, 4.0, 5.0, 12.0], [5.0, 0.0, 13.0]),
        ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        ([3e200, 4e200, 0.0, 1e100], [5e200, 0.0, 1e100]),
        ([np.inf, 1e200, 3.0, 4.0], [np.inf, 0.0, 5.0]),
        ([np.nan, 1.0, 3.0, 4.0], [np.nan, 0.0, 5.0]),
    ],
)
def test_the_gradient_norm_of_a_module_joins_those_of_its_parameters(
    norms: list[float], expected: list[float]
) -> None:
    layout = Layout(modules=MODULES, parameters=PARAMETERS)
    record = StepRecord(
        step=0, layout=layout, grad_norms=np.array(norms), grad_finite=np.isfinite(norms)
    )
    assert layout.owned == [[0, 1], [], [2, 3]]
    np.testing.assert_allclose(record.module_grad_norms, expected, rtol=1e-12)
    assert record.all_grads_finite == np.isfinite(norms).all()
