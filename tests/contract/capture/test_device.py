"""Training as on an accelerator: CPU tensors are measured by the path of other devices.

``gpu/test_gpu.py`` runs the same where there is a GPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import telemetry
from telemetry import HookLogger, StepRecord
from telemetry.testing import alerts_of, capture_run
from tests.helpers.applied import Applied
from tests.helpers.require import GRAPHS_CAN_BE_OBSERVED, require
from tests.helpers.twins import Loop, assert_left_alone, run, training

pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")  # 2.4

KINDS = ("outputs", "output_grads", "grads", "weights", "second_moments")
EXACT = ("count", "min", "max", "calls", "unit_count")


def elsewhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("telemetry.measure.device.is_on_host", lambda tensor: False)
    patch.setattr("telemetry.capture.parameters.TENSORS", None)


def wide() -> nn.Module:
    """Its outputs and weights have more elements than are sent whole."""
    layers = nn.Linear(300, 400), nn.LayerNorm(400), nn.ReLU(), nn.Linear(400, 300)
    return nn.Sequential(*layers)


def cnn() -> nn.Module:
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.3), nn.Linear(16 * 24 * 24, 10))
    return model.to(memory_format=torch.channels_last)


def checkpointed() -> nn.Module:
    forward = lambda m, x: m.head(checkpoint(m.block, x, use_reentrant=False))  # noqa: E731
    return Applied(forward, block=wide(), head=nn.Linear(300, 7))


def slices() -> nn.Module:
    """Its outputs are parts of a tensor, with gaps."""

    def forward(m: Any, x: Tensor) -> Tensor:
        one, two = m.both(x).chunk(2, dim=-1)
        return m.first(one) * m.second(two)

    return Applied(forward, both=nn.Linear(300, 800), first=nn.Identity(), second=nn.Identity())


def tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    model = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Tanh(), nn.Linear(400, 300))
    return parallelize_module(model, mesh, plan)


def compiled() -> nn.Module:
    model = wide()
    model.compile(backend="aot_eager")
    return model


def loss_of(model: nn.Module, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        return model(torch.randn(*shape)).float().square().mean()


ADAM = partial(torch.optim.Adam, lr=1e-3)


def loop(*shape: int, dtype: torch.dtype | None = None) -> Loop:
    return training(lambda model: loss_of(model, *shape, dtype=dtype), optimizer=ADAM)


LOOPS: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    "large tensors": (wide, loop(250, 300)),
    "bfloat16": (wide, loop(250, 300, dtype=torch.bfloat16)),
    "channels_last": (cnn, loop(16, 3, 24, 24)),
    "checkpointing": (checkpointed, loop(250, 300)),
    "slices": (slices, loop(250, 300)),
    "tensor parallel": (tensor_parallel, loop(250, 300)),
    "compiled": (compiled, loop(250, 300)),
}


@pytest.mark.parametrize("name", [*[*LOOPS][:-1], pytest.param("compiled", marks=pytest.mark.slow)])
def test_training_is_left_alone_and_figures_are_those_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, name: str
) -> None:
    if name == "tensor parallel":
        require("torch.distributed.fsdp.fully_shard")  # before it, DTensors do not train so
        request.getfixturevalue("process_group")
    if name == "compiled" and not GRAPHS_CAN_BE_OBSERVED:
        pytest.skip("before PyTorch 2.13, compiled graphs show no activations")
    make, train = LOOPS[name]
    expected = run(make, train, tmp_path / "host")
    with monkeypatch.context() as patch:
        elsewhere(patch)
        found = assert_left_alone(make, train, tmp_path / "elsewhere")
    assert len(found.full) == len(expected.full) == 3
    runs = [telemetry.read(tmp_path / name) for name in ("host", "elsewhere")]
    assert [run.estimated for run in runs] == [False, True]
    for one, two in zip(found.full, expected.full, strict=True):
        assert any(record.estimated for record in {**one.outputs, **one.weights}.values())
        assert_alike(one, two)


def assert_alike(found: StepRecord, expected: StepRecord) -> None:
    for kind in KINDS:
        assert [*getattr(found, kind)] == [*getattr(expected, kind)], kind
        one, two = getattr(found, kind).rows, getattr(expected, kind).rows
        for name in EXACT:
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)
        np.testing.assert_array_equal(one.units, two.units)
        np.testing.assert_allclose(one.sum_squares, two.sum_squares, rtol=1e-3)
        np.testing.assert_allclose(
            one.zero_count / one.count, two.zero_count / two.count, atol=0.02
        )
        assert not two.estimated.any()
    np.testing.assert_allclose(found.grad_norms, expected.grad_norms, rtol=1e-4)
    assert found.update_ratios == pytest.approx(expected.update_ratios, rel=1e-3)


def test_the_training_thread_reads_no_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profiler sees all operations of this thread, also those inside of hooks."""

    def operations(log_dir: Path | None) -> Counter[str]:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            run(wide, loop(250, 300), log_dir, measure="!images")
        return Counter(event.name for event in profiled.events())

    elsewhere(monkeypatch)
    of_ours = operations(tmp_path) - operations(None)
    assert of_ours["aten::aminmax"]
    waiting = ("item", "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")
    assert not {name: of_ours[f"aten::{name}"] for name in waiting if of_ours[f"aten::{name}"]}


def loop_of_gradients(*values: float | None) -> Loop:
    """A loop in which all gradients of the first weight are a step's value, if it has one."""

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-20)
        first = next(model.parameters())
        for value in values:
            loss = model(torch.ones(4, 3)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if value is not None:
                first.grad.fill_(value)
            optimizer.step()
            yield loss

    return loop


def test_a_gradient_whose_norm_leaves_float32_is_finite_at_a_full_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(monkeypatch)
    outcome = run(partial(nn.Linear, 3, 2), loop_of_gradients(1e25, math.inf), tmp_path)
    huge, infinite = outcome.full
    assert huge.grad_finite.all()
    assert huge.grad_norms[0] == pytest.approx(6**0.5 * 1e25, rel=1e-6)
    assert infinite.grad_finite.tolist() == [False, True]


def test_an_infinite_norm_of_an_ordinary_step_is_not_called_nonfinite_before_the_parameters_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm in float32 does not say whether an element is infinite."""

    elsewhere(monkeypatch)
    finite_at = {}
    for value in (1e25, math.inf):
        outcome = run(
            lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)),
            loop_of_gradients(None, value, None, None),
            tmp_path / str(value),
            every_n_steps=100,
            max_overhead=math.inf,
        )
        assert [record.full for record in outcome.records[:2]] == [True, False]
        assert 1e19 < outcome.records[1].grad_norms[0] < math.inf
        kinds = {alert.kind for alert in alerts_of(outcome.records)}
        finite_at[value] = "nonfinite" not in kinds
    assert finite_at == {1e25: True, math.inf: False}


def test_norms_that_overflow_before_a_fused_optimizer_unscales_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere(monkeypatch)
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu")
    with capture_run(model) as run:
        for scale in (1.0, math.inf, 1e17):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 3)).sum() * scale).backward()
            scaler.step(optimizer)
            scaler.update()
    _, skipped, large = run.records
    assert skipped.skipped
    assert np.isinf(skipped.grad_norms)
    assert not skipped.grad_finite
    np.testing.assert_allclose(large.grad_norms, 2e17 * 3**0.5)
    assert large.grad_finite
    assert all(record.outputs for record in run.records)
