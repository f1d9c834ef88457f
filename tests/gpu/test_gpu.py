"""On a GPU: training is unchanged to the bit and never blocked, and statistics equal NumPy's.

PyTorch's synchronisation debug mode raises where PyTorch would make the host wait for the device,
and a device that sleeps shows any other wait. ``unit/measure/test_measure.py`` measures
tensors of every layout and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import telemetry
from telemetry import HookLogger
from telemetry.interventions import clip_gradients, prune_activations, scale_gradients
from tests.helpers.hand import check
from tests.helpers.require import GRAPHS_CAN_BE_OBSERVED
from tests.helpers.twins import Loop, assert_left_alone, run, training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    # Of a thread of autograd's whose first work is a product of matrices.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

DEVICE = "cuda"
SECOND = 2_000_000_000  # cycles, about


@contextmanager
def no_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def guarded(loop: Loop) -> Loop:
    """The same loop, which must not wait except when it has yielded.

    At its end it also yields the state of the GPU's random numbers.
    """

    def run(model: nn.Module, logger: HookLogger | None) -> Iterator[object]:
        values, end = iter(loop(model, logger)), object()
        while True:
            with no_syncs():
                value = next(values, end)
            if value is end:
                break
            yield value
        yield torch.cuda.get_rng_state()

    return run


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep GradScaler from reading whether gradients are finite, for which it waits."""

    def step(scaler: object, optimizer: torch.optim.Optimizer, state: object, *args: Any) -> Any:
        return optimizer.step(*args)

    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.amp.GradScaler, "_maybe_opt_step", step)


# --- models and loops ----------------------------------------------------------------------------
# A default device would do for the inputs, but optimizers and scalers make numbers for the host.


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 2))


def cnn() -> nn.Module:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.3), nn.Linear(4 * 6 * 6, 5))


def channels_last() -> nn.Module:
    return cnn().to(memory_format=torch.channels_last)


class Checkpointed(nn.Module):
    """Its first part runs again in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, self.embed(x), use_reentrant=self.use_reentrant)
        return self.head(x)


def loss_of(model: nn.Module, *shape: int) -> Tensor:
    inputs, labels = torch.rand(8, *shape, device=DEVICE), torch.randint(0, 2, (8,), device=DEVICE)
    return F.cross_entropy(model(inputs), labels)


def step_of(model: nn.Module) -> Tensor:
    loss = loss_of(model, 4)
    loss.backward()
    return loss


def pictures(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(5):
        loss = loss_of(model, 1, 8, 8)
        optimizer.zero_grad()
        loss.backward()
        if logger is not None:
            logger.log(loss=loss)
        optimizer.step()
        yield loss


plain = training(lambda model: loss_of(model, 4))


def accumulating(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
    """Clipped gradients of two micro-batches; the learning rate is a tensor that changes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)
    optimizer.param_groups[0]["lr"] = rate = torch.full((), 0.1, device=DEVICE)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            loss = step_of(model)
            if logger is not None:
                logger.log(loss=loss)
            yield loss
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        rate.mul_(0.5)


def scaled(
    model: nn.Module, logger: HookLogger | None, *, autocast: bool, **options: bool
) -> Iterator[Tensor]:
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **options)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16, enabled=autocast):
            loss = loss_of(model, 4)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss


def validating(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
    for loss in plain(model, logger):
        yield loss
        with logger.phase("validation") if logger is not None else nullcontext(), torch.no_grad():
            model(torch.rand(8, 4, device=DEVICE))


def on_two_streams(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
    """Each micro-batch on its own stream; the optimizer's waits for both."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    main, streams = torch.cuda.current_stream(), [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(3):
        optimizer.zero_grad()
        for stream in streams:
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                # A graph that were kept would be the stream's for the next micro-batch, too.
                loss = step_of(model).detach()
            main.wait_stream(stream)
            loss.record_stream(main)
            yield loss
        optimizer.step()


def lowered(dtype: torch.dtype | None, **options: Any) -> Loop:
    def loss(model: nn.Module) -> Tensor:
        with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
            return loss_of(model, 1, 8, 8)

    return training(loss, **options)


def intervened(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
    with (
        clip_gradients(model, "0.*", max_norm=0.1),
        clip_gradients(model, "2.*", max_value=0.1),
        scale_gradients(model, "3.*", 0.5),
        prune_activations(model, threshold=0.1),
    ):
        yield from plain(model, logger)


LOOPS: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    "CNN": (cnn, pictures),
    "accumulation and clipping": (mlp, accumulating),
    "GradScaler": (mlp, partial(scaled, autocast=False)),
    "autocast and GradScaler": (mlp, partial(scaled, autocast=True)),
    "fused optimizer with GradScaler": (mlp, partial(scaled, autocast=True, fused=True)),
    "bfloat16, channels_last": (
        channels_last,
        lowered(torch.bfloat16, optimizer=partial(torch.optim.AdamW, fused=True)),
    ),
    "checkpointing": (partial(Checkpointed, False), plain),
    "reentrant checkpointing": (partial(Checkpointed, True), plain),
    "validation": (mlp, validating),
    "interventions": (mlp, intervened),
    "two streams": (mlp, on_two_streams),
}


# --- training ------------------------------------------------------------------------------------


def moved(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().to(DEVICE)


def warnings_of_ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "telemetry"]


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("every_n_steps", [1, 2])
def test_training_is_left_alone_and_never_synchronizes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, every_n_steps: int
) -> None:
    make, loop = LOOPS[name]
    outcome = assert_left_alone(moved(make), guarded(loop), tmp_path, every_n_steps=every_n_steps)
    assert warnings_of_ours(caplog) == []
    for record in outcome.full:
        assert record.grads
        assert all(tensor.sketch.count for tensor in record.activations.values())
        assert bool(record.feature_maps and record.filters) is (make in (cnn, channels_last))


@pytest.mark.parametrize("every_n_steps", [1, 1000])
def test_a_step_ends_before_the_device_starts_it(tmp_path: Path, every_n_steps: int) -> None:
    # Small enough for the device's queue: a launch blocks when the queue is full.
    model = nn.Linear(4, 2).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, started = torch.rand(8, 4, device=DEVICE), torch.cuda.Event()

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    with HookLogger(model, tmp_path, every_n_steps=every_n_steps) as logger:
        for _ in range(3):  # one-time loading and allocation may block
            step()
            logger.flush()
        torch.cuda.synchronize()
        torch.cuda._sleep(2 * SECOND)
        started.record()
        step()
        assert not started.query()


def test_a_logged_value_is_that_of_the_call(tmp_path: Path) -> None:
    model, loss = mlp().to(DEVICE), torch.ones((), device=DEVICE)
    with HookLogger(model, tmp_path) as logger:
        torch.cuda._sleep(SECOND // 20)  # the device is behind
        with no_syncs():
            logger.log(loss=loss)
            loss.zero_()
        step_of(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    scalars = telemetry.read(tmp_path).scalars
    assert scalars[scalars["tag"] == "loss"]["value"].tolist() == [1.0]


@pytest.mark.filterwarnings("ignore")  # the compiler's
def test_a_compiled_model_is_left_alone_and_never_synchronizes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before PyTorch 2.13, compiled graphs show no activations, and one message reports it."""

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        torch._dynamo.reset_code_caches()  # or the watched twin would run the bare one's graphs
        model.compile()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            # The compiler itself may wait.
            with no_syncs() if number > 1 else nullcontext():
                optimizer.zero_grad()
                loss = step_of(model)
                optimizer.step()
            yield loss

    outcome = assert_left_alone(moved(mlp), loop, tmp_path)
    warnings = warnings_of_ours(caplog)
    assert all(record.grads for record in outcome.full)
    assert all(bool(record.activations) == GRAPHS_CAN_BE_OBSERVED for record in outcome.full)
    assert len(warnings) == (not GRAPHS_CAN_BE_OBSERVED)
    assert all("cannot show what happens inside" in warning for warning in warnings)


@pytest.mark.filterwarnings("ignore")  # the profiler's
def test_a_full_step_copies_to_the_host_twice_at_most(tmp_path: Path) -> None:
    """One copy of the tensors' rows and one of everything else."""

    def quiet(model: nn.Module, logger: HookLogger | None) -> Iterable[object]:
        return plain(model, None)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        outcome = run(moved(mlp), quiet, tmp_path)
        torch.cuda.synchronize()
    copies = [event for event in profile.events() if "DtoH" in event.name]
    assert 0 < len(outcome.full) <= len(copies) <= 2 * len(outcome.full)


def test_a_step_in_a_captured_graph_is_left_alone(tmp_path: Path) -> None:
    """The captured step is not measured, and the capture contains no work of the logger.

    The steps before are written meanwhile, on another thread, and the capture stays valid.
    """

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs, graph = torch.rand(8, 4, device=DEVICE), torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        optimizer.zero_grad()
        with torch.cuda.graph(graph):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            if logger is not None:
                logger.flush()
                with pytest.raises(RuntimeError, match="log it after the graph was replayed"):
                    logger.log(loss=loss)
        for _ in range(3):
            graph.replay()
            yield loss

    outcome = assert_left_alone(moved(mlp), loop, tmp_path)
    first, *_, last = outcome.yielded
    assert last < first
    assert [record.step for record in outcome.full if record.activations] == [0, 1, 2]


@pytest.mark.parametrize("make", [cnn, channels_last])
@pytest.mark.parametrize("lower", [None, torch.bfloat16, torch.float16], ids=str)
def test_statistics_equal_those_of_plain_hooks(
    tmp_path: Path, make: Callable[[], nn.Module], lower: torch.dtype | None
) -> None:
    outcome, _ = check(moved(make), lowered(lower), tmp_path)
    assert len(outcome.full[0].activations) == 6
