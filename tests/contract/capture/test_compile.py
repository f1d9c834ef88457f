"""Models that torch.compile has compiled: same training, right values, two graphs, no breaks."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from telemetry import HookLogger, StepRecord
from telemetry.testing import capture_run
from tests.helpers.hand import assert_logged, by_hand
from tests.helpers.loops import scalars
from tests.helpers.require import GRAPHS_CAN_BE_OBSERVED, needs_observable_graphs
from tests.helpers.twins import Outcome, assert_left_alone, batch, loss_of, training

# The compiler warns of its own doings.
pytestmark = pytest.mark.filterwarnings("ignore::Warning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()  # or later tests' messages would take compiling into account


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.relu(self.linear(x))


class Net(nn.Module):
    """Two equal blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x))


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


Compile = Callable[[nn.Module], Callable[[Tensor], Tensor]]


def whole(model: nn.Module, backend: Any = "aot_eager") -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def regional(model: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def not_at_all(model: nn.Module) -> nn.Module:
    return model


def loop_with(
    compiled: Compile,
    *,
    steps: int = 6,
    batch_sizes: tuple[int, ...] = (5,),
    loss: Callable[..., Tensor] = loss_of,
) -> Callable[..., Iterator[Tensor]]:
    """Training; the first step of the optimizer comes after ``compiled`` was made."""

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        torch._dynamo.reset_code_caches()  # or the watched twin would run the bare one's graphs
        forward, sizes = compiled(model), itertools.cycle(batch_sizes)
        of_batch = lambda _: loss(forward, torch.randn(next(sizes), 4))  # noqa: E731
        yield from training(of_batch, steps)(model, logger)

    return loop


def assert_values(outcome: Outcome, make: Callable[[], nn.Module] = Net) -> None:
    """Compare the logged values with those of the same model without the compiler."""
    hand = by_hand(make, loop_with(not_at_all, steps=len(outcome.records)))
    for record, step in zip(outcome.records, hand, strict=True):
        if record.full:
            assert_logged(record, step)


@needs_observable_graphs
@pytest.mark.parametrize("compiled", [whole, in_place, regional])
def test_a_compiled_model_is_logged_and_left_alone(tmp_path: Path, compiled: Compile) -> None:
    outcome = assert_left_alone(Net, loop_with(compiled), tmp_path, every_n_steps=3)
    assert [record.step for record in outcome.full] == [0, 3]
    assert_values(outcome)


@pytest.mark.skipif(GRAPHS_CAN_BE_OBSERVED, reason="for PyTorch before 2.13")
@pytest.mark.parametrize("compiled", [whole, in_place, regional])
def test_graphs_that_cannot_be_observed_are_left_alone_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, compiled: Compile
) -> None:
    outcome = assert_left_alone(Net, loop_with(compiled), tmp_path, every_n_steps=3)
    assert all(record.grad_present.all() for record in outcome.full)
    assert caplog.text.count(f"PyTorch {torch.__version__} cannot show") == 1


@needs_observable_graphs
def test_a_model_compiled_with_inductor_is_logged_and_left_alone(tmp_path: Path) -> None:
    loop = loop_with(partial(whole, backend="inductor"), steps=4)

    def make() -> nn.Module:
        model = Net()
        model.dropout.p = 0.0  # inductor draws other random numbers than eager
        return model

    outcome = assert_left_alone(make, loop, tmp_path, every_n_steps=3)
    assert_values(outcome, make)


@needs_observable_graphs
@pytest.mark.parametrize("compiled", [whole, regional])
def test_logging_adds_one_graph_and_no_breaks(tmp_path: Path, compiled: Compile) -> None:
    """One graph with observers, one without; equal blocks share theirs."""
    model = Net()
    graphs = []
    with HookLogger(model, tmp_path, every_n_steps=3):
        for _ in loop_with(compiled, steps=8)(model, None):
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 2, 2, 2, 2, 2, 2, 2]
    assert not counters["graph_break"]


@needs_observable_graphs
def test_unlogged_steps_run_a_graph_without_observers(tmp_path: Path) -> None:
    graphs: list[str] = []
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        number = len(graphs)
        graphs.append(graph.print_readable(print_output=False))
        return lambda *args: (calls.append(number), graph.forward(*args))[1]

    with HookLogger(model := Net(), tmp_path, every_n_steps=3):
        assert len([*loop_with(partial(whole, backend=backend), steps=7)(model, None)]) == 7
    assert ["telemetry.observe" in graph for graph in graphs] == [True, False]
    assert calls == [0, 1, 1, 0, 1, 1, 0]


@needs_observable_graphs
def test_a_batch_of_another_size_makes_one_more_graph_of_each_kind(tmp_path: Path) -> None:
    loop = loop_with(whole, steps=8, batch_sizes=(5, 5, 7, 7, 9, 9, 6, 4))
    outcome = assert_left_alone(Net, loop, tmp_path, every_n_steps=2)
    assert [record.step for record in outcome.full] == [0, 2, 4, 6]
    sizes = [record.activations["head"].sketch.count for record in outcome.full]
    assert sizes == [5 * 2, 7 * 2, 9 * 2, 6 * 2]
    # Each of two kinds: for one size, and for any; of two twins.
    assert counters["stats"]["unique_graphs"] == 2 + 4


@needs_observable_graphs
def test_the_first_compiled_call_may_be_on_an_unlogged_step(tmp_path: Path) -> None:
    """Training that is resumed: the first step is not one that is measured."""
    loop = loop_with(whole, steps=4)
    outcome = assert_left_alone(Net, loop, tmp_path, every_n_steps=3, first_step=1)
    [record] = outcome.full
    assert record.step == 3
    assert record.activations["head"].calls == 1
    assert record.activation_grads["blocks.0.linear"].calls == 1


@needs_observable_graphs
def test_autocast_leaves_the_random_stream_alone(tmp_path: Path) -> None:
    """Fusion may round otherwise on a logged step, so that values are close and no more."""

    def loss(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(x).float().square().mean()

    loop = loop_with(whole, steps=4, loss=loss)
    outcome = assert_left_alone(Net, loop, tmp_path, every_n_steps=3)
    assert outcome.full[1].activations["head"].calls == 1


@needs_observable_graphs
def test_validation_phases_of_a_compiled_model_are_logged(tmp_path: Path) -> None:
    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        torch._dynamo.reset_code_caches()
        forward = whole(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model.eval()
            with torch.no_grad():
                if logger is not None:
                    with logger.phase("validation"):
                        forward(torch.ones(5, 4))
                forward(torch.ones(5, 4))
            model.train()
            optimizer.zero_grad()
            loss = forward(torch.randn(5, 4)).square().mean()
            loss.backward()
            optimizer.step()
            yield loss

    outcome = assert_left_alone(Net, loop, tmp_path, every_n_steps=3)
    for record in outcome.full:
        assert record.activations["head"].calls == 1
    assert [*scalars(tmp_path, "validation/activation_max/0000.embed")] == [0, 1, 2, 3]
    # Bare: evaluation, training. Watched: two graphs of each.
    assert counters["stats"]["unique_graphs"] == 2 + 4


@needs_observable_graphs
def test_checkpointing_inside_of_a_compiled_region_is_logged_once(tmp_path: Path) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(self.dropout(x))

    outcome = assert_left_alone(Checkpointed, loop_with(whole, steps=4), tmp_path, every_n_steps=3)
    for record in outcome.full:
        assert record.activations["blocks.1.linear"].calls == 1
        assert record.activation_grads["head"].calls == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_training_step_is_left_alone(backend: str, tmp_path: Path) -> None:
    """The compiler sees the backward pass and the optimizer, and ends its graphs there.

    ``aot_eager`` compiles the backward pass when it runs, which is inside of the compiled step.
    """

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        torch._dynamo.reset_code_caches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        compiled = torch.compile(step, backend=backend)
        for _ in range(7):
            yield compiled(torch.randn(5, 4))

    assert_left_alone(Net, loop, tmp_path, every_n_steps=3)


def test_a_compiled_optimizer_is_counted(tmp_path: Path) -> None:
    def compiled(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        return optimizer

    loop = training(steps=4, optimizer=compiled)
    outcome = assert_left_alone(partial(nn.Linear, 4, 2), loop, tmp_path, every_n_steps=3)
    assert [record.step for record in outcome.records] == [0, 1, 2, 3]
    assert outcome.full[0].update_ratios["weight"] > 0
    # The hooks break the graph twice; the optimizer's computation is one graph, as without them.
    assert counters["stats"]["unique_graphs"] == 2 * 1


@needs_observable_graphs
@pytest.mark.parametrize("compiled", [whole, not_at_all])
@pytest.mark.parametrize("way", ["setting", "context manager", "in one graph"])
def test_compiled_autograd_costs_activation_gradients_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, compiled: Compile, way: str
) -> None:
    """Nothing is known of its context manager until the first backward pass."""
    compiler = torch.compile(backend="aot_eager", fullgraph=way == "in one graph")

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        with torch._dynamo.config.patch(compiled_autograd=way == "setting"):
            if logger is not None and way == "setting":
                logger.remove()
                logger.attach()
            torch._dynamo.reset_code_caches()
            forward, optimizer = compiled(model), torch.optim.SGD(model.parameters(), lr=0.1)
            enabled = torch._dynamo.compiled_autograd._enable
            for _ in range(3):
                optimizer.zero_grad()
                loss = loss_of(forward, torch.randn(5, 4))
                with nullcontext() if way == "setting" else enabled(compiler):
                    loss.backward()
                optimizer.step()
                yield loss

    outcome = assert_left_alone(small_net, loop, tmp_path, every_n_steps=2)
    assert caplog.text.count("compiled autograd is on") == 1
    assert "Traceback" not in caplog.text
    assert [record.step for record in outcome.full] == [0, 2]
    for record in outcome.full:
        assert [tensor.calls for tensor in record.activations.values()] == [1] * 3
        assert not record.activation_grads
        assert record.grad_present.all()


@pytest.mark.parametrize("way", ["script", "trace"])
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_model_of_torch_jit_is_logged_without_its_activations(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    def make() -> Any:
        model = small_net()  # after some calls of a tanh, torch.jit itself rounds otherwise
        return torch.jit.script(model) if way == "script" else torch.jit.trace(model, batch())

    outcome = assert_left_alone(make, loop_with(not_at_all, steps=3), tmp_path, every_n_steps=2)
    for record in outcome.full:
        assert len(record.grads) == len(record.weights) == 4
        assert not record.activations
    assert caplog.text.count("torch.jit has compiled") == 1
    assert not any(words in caplog.text for words in ("Traceback", "seen running"))


def trained_after_compiling(compiled: Compile, remedy: str = "none") -> list[StepRecord]:
    """Three steps of a model whose compiled code has run before it was watched."""
    model, steps = Net(), itertools.count()
    forward = compiled(model)
    forward(torch.randn(5, 4)).sum().backward()

    def loss(_: nn.Module) -> Tensor:
        eager = remedy == "force_eager" and next(steps) % 2 == 0
        with torch.compiler.set_stance("force_eager" if eager else "default"):
            return forward(torch.randn(5, 4)).sum()

    with capture_run(model, every_n_steps=2) as run:
        if remedy == "reset_code_caches":
            torch._dynamo.reset_code_caches()
        assert len([*training(loss)(model, None)]) == 3
    return run.records


@needs_observable_graphs
@pytest.mark.parametrize("compiled", [whole, in_place, regional])
def test_a_model_that_was_compiled_before_is_reported_with_the_remedies(
    caplog: pytest.LogCaptureFixture, compiled: Compile
) -> None:
    records = trained_after_compiling(compiled)
    [message] = [r.getMessage() for r in caplog.records if "compiled before" in r.getMessage()]
    for remedy in ("before the first compiled call", "reset_code_caches", "force_eager"):
        assert remedy in message
    if compiled is regional:
        assert "4 of 7 watched modules" in message
        assert "blocks.0.linear" in message
    assert records[0].grad_present.all()


@needs_observable_graphs
@pytest.mark.parametrize("remedy", ["reset_code_caches", "force_eager"])
def test_dropping_the_compiled_code_or_running_logged_steps_eagerly_is_a_remedy(
    remedy: str,
) -> None:
    records = trained_after_compiling(whole, remedy)
    assert [len(record.activations) for record in records] == [7, 0, 7]


def test_after_close_the_compiled_model_still_runs_and_no_reference_is_kept(tmp_path: Path) -> None:
    model = Net()
    forward = whole(model)
    train = training(lambda _: forward(torch.randn(5, 4)).sum())
    logger = HookLogger(model, tmp_path, every_n_steps=2)
    assert len([*train(model, logger)]) == 3
    logger.close()
    reference = weakref.ref(logger)
    del logger
    assert not any(module._forward_hooks for module in model.modules())
    assert len([*train(model, None)]) == 3
    gc.collect()
    assert reference() is None
