"""Streams, copies and training on a simulated GPU: nothing synchronizes or races."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from telemetry import HookLogger
from telemetry.interventions import clip_gradients, prune_activations, scale_gradients
from telemetry.measure import Measurer
from telemetry.records import StepRecord, TensorRecord
from telemetry.torch_private.host_copy import HostCopy, send
from tests.helpers import simulated_gpu as gpu
from tests.helpers.device_loops import LOOPS, guarded, mlp, plain, skip_no_steps
from tests.helpers.device_tensors import LAYOUTS, VALUES, assert_measured, made
from tests.helpers.stubbed import Driver, needs_stub
from tests.helpers.twins import assert_left_alone, run

CLOSE = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True, params=["operations", pytest.param("kernels", marks=needs_stub)])
def driver(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Driver | None:
    """The stub, if kernels measure; None if PyTorch's operations do."""
    skip_no_steps(monkeypatch)
    if request.param == "kernels":
        return gpu.install_with_kernels(monkeypatch, tmp_path_factory.getbasetemp())
    gpu.install(monkeypatch)
    return None


def moved(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make()._apply(gpu.on_gpu)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device=gpu.DEVICE)


# --- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOOPS)
def test_training_is_left_alone_and_never_synchronizes(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    driver: Driver | None,
    name: str,
) -> None:
    make, loop = LOOPS[name]
    outcome = assert_left_alone(moved(make), guarded(loop, gpu.no_syncs), tmp_path / "gpu")
    assert [r.getMessage() for r in caplog.records if r.name == "telemetry"] == []
    if driver is not None:
        counts = driver.counts()
        assert any(counts[f"measure{kind}_4"] for kind in ("", "_wide", "_last", "_middle"))
        assert counts["measure_many_2"]
        assert counts["norms"]
    with pytest.MonkeyPatch.context() as patches:
        gpu.take_as_plain(patches, Tensor)
        expected = run(make, loop, tmp_path / "cpu")
    assert len(outcome.records) == len(expected.records)
    for record, on_cpu in zip(outcome.records, expected.records, strict=True):
        assert_same_record(record, on_cpu)
    assert gpu.given_away() == 0


def assert_same_record(record: StepRecord, expected: StepRecord) -> None:
    CLOSE(record.grad_norms, expected.grad_norms)
    assert record.grad_present.tolist() == expected.grad_present.tolist()
    assert record.learning_rates == pytest.approx(expected.learning_rates)
    assert (record.loss_scale, record.skipped_steps) == (
        expected.loss_scale,
        expected.skipped_steps,
    )
    assert record.update_ratios == pytest.approx(expected.update_ratios, rel=1e-3, abs=1e-5)
    for kind in ("activations", "activation_grads", "grads", "weights"):
        got, wanted = getattr(record, kind), getattr(expected, kind)
        assert list(got) == list(wanted)
        for name in wanted:
            assert_same_tensor(got[name], wanted[name])
    for kind in ("feature_maps", "filters"):
        got, wanted = getattr(record, kind), getattr(expected, kind)
        assert list(got) == list(wanted)
        for name in wanted:
            np.testing.assert_array_equal(got[name], wanted[name])


def assert_same_tensor(got: TensorRecord, wanted: TensorRecord) -> None:
    a, b = got.sketch, wanted.sketch
    assert (a.count, a.zero_count, a.nan_count) == (b.count, b.zero_count, b.nan_count)
    assert a.counts.sum() == b.counts.sum()
    CLOSE([a.min, a.max, a.sum, a.sum_squares], [b.min, b.max, b.sum, b.sum_squares])
    if wanted.unit_min is not None:
        CLOSE(got.unit_min, wanted.unit_min)
        CLOSE(got.unit_max, wanted.unit_max)


@pytest.mark.parametrize("name", ["CNN", "checkpointing"])
def test_a_logged_step_is_one_copy_to_the_host(tmp_path: Path, name: str) -> None:
    make, loop = LOOPS[name]

    def quiet(model: nn.Module, logger: HookLogger | None) -> Iterable[object]:
        return loop(model, None)

    outcome = run(moved(make), quiet, tmp_path)
    assert len(outcome.full) == len(gpu.transfers) > 0


def test_interventions_do_not_synchronize() -> None:
    model = moved(mlp)()
    with (
        clip_gradients(model, "0.*", max_norm=0.1),
        clip_gradients(model, "2.*", max_value=0.1),
        scale_gradients(model, "3.*", 0.5),
        prune_activations(model, threshold=0.1),
        gpu.no_syncs(),
    ):
        for _ in plain(model, None):
            pass


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.isnan().any()),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: torch.tensor([1.0], device=x.device),
    ],
    ids=["item", "bool", "mask", "cpu", "tensor"],
)
def test_a_synchronization_would_be_noticed(wait: Callable[[Tensor], object]) -> None:
    tensor = ones(3)
    with gpu.no_syncs(), pytest.raises(gpu.WaitError):
        wait(tensor)


# --- measuring -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_equal_those_of_numpy(dtype: torch.dtype, layout: str) -> None:
    view, axis = LAYOUTS[layout]
    tensors = [made(dtype, values) for values in VALUES]
    on_device, measurer = [gpu.on_gpu(tensor) for tensor in tensors], Measurer()
    with gpu.no_syncs():
        for tensor in on_device:
            measurer.add(view(tensor), unit_axis=axis)
        measurements = measurer.finish()
    for record, tensor in zip(measurements.reduce().values(), tensors, strict=True):
        assert_measured(record, view(tensor), axis)


# --- streams -------------------------------------------------------------------------------------


def test_an_unordered_access_would_be_noticed() -> None:
    tensor, other = ones(3), gpu.Stream()
    with gpu.use_stream(other), pytest.raises(gpu.RaceError):
        tensor.sum()
    other.wait_stream(gpu.default_stream)
    with gpu.use_stream(other):
        tensor.sum()
    with pytest.raises(gpu.RaceError):
        tensor.zero_()
    assert gpu.given_away() == 1
    tensor.record_stream(other)
    assert gpu.given_away() == 0


def test_a_host_copy_has_the_values_at_the_call() -> None:
    tensor, other = ones(3), gpu.Stream()
    with gpu.no_syncs():
        copies = [HostCopy(tensor), HostCopy(tensor.half().sum())]
        tensor.zero_()
        with gpu.use_stream(other):
            copies += [HostCopy(ones(2, 2).long() * 5), HostCopy(ones().bool()), HostCopy(ones(0))]
        send(gpu.DEVICE)
    assert gpu.transfers == [3 * 4 + 2 + 4 * 8 + 1]
    values = [copy.wait() for copy in copies]
    assert [v.tolist() for v in values] == [[1, 1, 1], 3, [[5, 5], [5, 5]], True, []]
    assert values[1].dtype == torch.float16
    assert {v.device.type for v in values} == {"cpu"}
    assert gpu.given_away() == 0


def test_a_finished_copy_is_recognized_without_synchronizing() -> None:
    copy = HostCopy(ones(3))
    with gpu.no_syncs():
        assert [copy.arrived() for _ in range(4)] == [False, False, True, True]
    assert gpu.transfers == [3 * 4]
    assert copy.wait().tolist() == [1, 1, 1]


def test_parameters_that_change_without_a_step_are_logged_when_that_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    passes: list[int] = []

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[None]:
        for number in range(1, 31):
            model(torch.rand(3, 4, device=gpu.DEVICE)).square().mean().backward()
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad.zero_()
            passes.extend([number] * len(caplog.records))
            yield

    assert_left_alone(moved(mlp), guarded(loop, gpu.no_syncs), tmp_path)
    assert "logger.step()" in caplog.records[0].getMessage()
    assert 20 < passes[0] < 25
    assert gpu.given_away() == 0


def test_unwanted_values_are_not_copied_to_the_host() -> None:
    copy = HostCopy(ones(3))
    reference = weakref.ref(copy)
    del copy
    gc.collect()
    assert reference() is None
    HostCopy(ones(5)).wait()
    assert gpu.transfers == [5 * 4]


def test_tensors_of_several_streams_are_measured() -> None:
    measurer, streams = Measurer(), [gpu.Stream(), gpu.default_stream, gpu.Stream()]
    with gpu.no_syncs():
        for number, stream in enumerate(streams):
            with gpu.use_stream(stream):
                measurer.add(ones(5, 5) * number, unit_axis=1)
        measurements = measurer.finish()
    assert len(gpu.transfers) == 1
    assert measurements.reduce().rows.sum.tolist() == [0, 25, 50]
    assert gpu.given_away() == 0


def test_nothing_is_copied_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="log it after the graph was replayed"):
        HostCopy(ones(3))
