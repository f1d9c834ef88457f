"""Training on a GPU: left alone to the bit, and never made to wait.

PyTorch's synchronisation debug mode raises where the host would wait for the device. A simulated
GPU runs the same loops where there is none, see ``test_simulated_gpu.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from device_loops import LOOPS, guarded, mlp, plain, scaled, skip_no_steps, step_of
from moments_close import assert_moments_close
from test_logger import small_cnn
from torch import Tensor, nn
from twins import Loop, assert_left_alone, run

from telemetry import HookLogger
from telemetry.measure import Measurer
from telemetry.records.sketch import sketch_array
from telemetry.torch_private.host_copy import HostCopy

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@contextlib.contextmanager
def no_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    skip_no_steps(monkeypatch)
    with torch.device(DEVICE):
        yield


def on_two_streams(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
    """Each micro-batch on its own stream; the optimizer's waits for both."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    main, streams = torch.cuda.current_stream(), [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(3):
        optimizer.zero_grad()
        for stream in streams:
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                loss = step_of(model)
            main.wait_stream(stream)
            loss.record_stream(main)
            yield loss
        optimizer.step()


GPU_LOOPS: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    **LOOPS,
    "autocast and GradScaler": (mlp, partial(scaled, autocast=True)),
    "fused optimizer with GradScaler": (mlp, partial(scaled, autocast=True, fused=True)),
    "two streams": (mlp, on_two_streams),
}


def warnings_of_ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "telemetry"]


@pytest.mark.parametrize("name", GPU_LOOPS)
@pytest.mark.parametrize("every_n_steps", [1, 2])
def test_training_is_left_alone_and_never_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, every_n_steps: int
) -> None:
    make, loop = GPU_LOOPS[name]
    outcome = assert_left_alone(
        make, guarded(loop, no_syncs), tmp_path, every_n_steps=every_n_steps
    )
    assert warnings_of_ours(caplog) == []
    for record in outcome.full:
        assert record.grads
        assert all(tensor.sketch.count for tensor in record.activations.values())


def test_a_compiled_model_is_left_alone_and_never_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        torch.compiler.reset()  # its code does not look whether modules have got hooks since
        model.compile()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            # The compiler itself may wait.
            with no_syncs() if number > 1 else contextlib.nullcontext():
                optimizer.zero_grad()
                loss = step_of(model)
                optimizer.step()
            yield loss

    outcome = assert_left_alone(mlp, loop, tmp_path)
    assert warnings_of_ours(caplog) == []
    assert all(record.activations for record in outcome.full)


def test_a_logged_step_is_one_copy_to_the_host(tmp_path: Path) -> None:
    def quiet(model: nn.Module, logger: HookLogger | None) -> Iterable[object]:
        return plain(model, None)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with torch.device("cpu"):  # keeps twins from drawing a number on the GPU
            model = mlp().to(DEVICE)
        with torch.device(DEVICE):
            outcome = run(lambda: model, quiet, tmp_path)
    copies = [event for event in profile.events() if "DtoH" in event.name]
    drawn = 1  # by the twins, to compare streams of random numbers
    assert len(copies) == len(outcome.full) + drawn


def test_a_captured_step_is_left_alone(tmp_path: Path) -> None:
    """Nothing of it is seen, and nothing else is captured."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, graph = torch.rand(8, 4), torch.cuda.CUDAGraph()
    with HookLogger(model, tmp_path, every_n_steps=1) as logger:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        logger.flush()
        optimizer.zero_grad()
        with torch.cuda.graph(graph):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            with pytest.raises(RuntimeError, match="log it after the graph was replayed"):
                logger.log(loss=loss)
        before = loss.clone()
        for _ in range(3):
            graph.replay()
        assert loss < before or not before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 8192, 5_000_003])
def test_a_device_agrees_with_numpy(dtype: torch.dtype, count: int) -> None:
    tensor = torch.randn(count).mul(3).relu().sub(0.25).to(dtype)
    measurer = Measurer()
    measurer.add(tensor)
    [record] = measurer.finish().reduce().values()
    expected = sketch_array(tensor.cpu().float().numpy())
    assert_moments_close(record.sketch, expected, rtol=1e-12)
    assert np.array_equal(record.sketch.buckets, expected.buckets)
    assert np.array_equal(record.sketch.counts, expected.counts)


def test_a_tensor_on_another_gpu_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    tensor = torch.arange(100_000.0, device="cuda:1")
    with torch.cuda.device(0):
        measurer = Measurer()
        measurer.add(tensor)
        copy = HostCopy(tensor)
        [record] = measurer.finish().reduce().values()
    assert record.sketch.max == 99_999
    assert copy.wait().equal(tensor.cpu())


def test_a_copy_has_the_values_of_its_time() -> None:
    tensor = torch.ones(1 << 20)
    torch.cuda._sleep(100_000_000)  # the device is behind
    with no_syncs():
        copy = HostCopy(tensor)
        tensor.zero_()
    assert copy.wait().sum() == 1 << 20
    assert copy.wait().is_pinned()


def test_images_of_a_network_are_drawn(tmp_path: Path) -> None:
    outcome = run(small_cnn, LOOPS["CNN"][1], tmp_path)
    assert all(record.feature_maps and record.filters for record in outcome.full)
