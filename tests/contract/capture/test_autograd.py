"""Forward and backward passes that are training, and those that are not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.util.tensor_util import make_ndarray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from telemetry import HookLogger
from telemetry.testing import capture_run
from tests.helpers.applied import Applied
from tests.helpers.hand import (
    TwoParts,
    assert_logged,
    by_hand,
    check,
    not_training,
    selective_checkpoint,
)
from tests.helpers.loops import load
from tests.helpers.twins import Recorder, assert_left_alone, batch, loss_of, mlp, seed, training


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_gradients_through_the_graph_of_an_earlier_step_are_not_logged(tmp_path: Path) -> None:
    """Truncated backpropagation through time, with a state that is not detached."""

    def loop(model: Any, logger: HookLogger | None) -> Iterator[None]:
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        state = torch.zeros(6, 4)
        for _ in range(3):
            optimizer.zero_grad()
            state = state + model[0](batch())[:, :4]
            model[2](torch.cat([state, state[:, :2]], 1)).sum().backward(retain_graph=True)
            optimizer.step()
            yield

    outcome = assert_left_alone(mlp, loop, tmp_path)
    assert [r.activation_grads["0"].calls for r in outcome.full] == [1, 1, 1]


def test_probes_by_autograd_grad_are_not_logged(tmp_path: Path) -> None:
    def probed(model: nn.Module) -> Tensor:
        x = batch().requires_grad_()
        loss = loss_of(model, x)
        with not_training():
            torch.autograd.grad(loss, x, retain_graph=True)
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return loss

    check(mlp, training(probed), tmp_path)


def test_a_backward_pass_that_builds_a_graph_is_logged(tmp_path: Path) -> None:
    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[None]:
        optimizer = sgd(model)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward(create_graph=True)
            optimizer.step()
            yield

    with pytest.warns(UserWarning, match="create_graph=True"):
        check(mlp, loop, tmp_path)


def test_a_head_in_training_mode_is_logged_at_once_and_the_rest_from_the_second_step(
    tmp_path: Path,
) -> None:
    def of_the_head(model: Any) -> Tensor:
        model.eval()
        model[2].train()
        return loss_of(model)

    outcome = assert_left_alone(mlp, training(of_the_head), tmp_path)
    assert [list(record.activations) for record in outcome.full] == [["2"], *[["0", "1", "2"]] * 2]


def validating_loop(model: nn.Module, logger: HookLogger | None) -> Iterator[None]:
    optimizer = sgd(model)
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(model).backward()
        if logger is not None:
            with logger.phase("validation"), torch.no_grad():
                model.eval()
                loss_of(model, torch.ones(6, 4))
                loss_of(model, torch.zeros(6, 4))
                model.train()
        optimizer.step()
        yield


@pytest.mark.parametrize("every_n_steps", [1, 3])
def test_a_phase_is_logged_apart_from_training(tmp_path: Path, every_n_steps: int) -> None:
    outcome = assert_left_alone(mlp, validating_loop, tmp_path, every_n_steps=every_n_steps)
    for record, hand in zip(outcome.records, by_hand(mlp, validating_loop), strict=True):
        if record.full:
            assert_logged(record, hand)
    assert [r.step for r in outcome.full] == [s for s in range(4) if s % every_n_steps == 0]
    counts = histogram_counts(tmp_path, "validation/activation/0000.0")
    assert counts == dict.fromkeys(range(4), 2 * 6 * 6)
    seed(0)
    layer = mlp()[0]
    expected = torch.cat([layer(torch.ones(6, 4)), layer(torch.zeros(6, 4))])
    [first, *_] = load(tmp_path).Scalars("validation/activation_max/0000.0")
    assert first.value == pytest.approx(expected.max().item())
    assert not any("validation/activation_grad" in tag for tag in load(tmp_path).Tags()["tensors"])


def histogram_counts(log_dir: Path, tag: str) -> dict[int, int]:
    events = load(log_dir).Tensors(tag)
    return {event.step: make_ndarray(event.tensor_proto)[:, 2].sum() for event in events}


def test_a_nested_phase_is_logged_apart_from_the_outer_phase(tmp_path: Path) -> None:
    model = mlp()
    with HookLogger(model, tmp_path, every_n_steps=100, alerts=()) as logger:
        with logger.phase("outer"):
            model(batch())
            with logger.phase("inner"):
                model(batch())
                model(batch())
            model(batch())
            model(batch())
        model(batch())
    assert histogram_counts(tmp_path, "outer/activation/0000.0") == {0: 3 * 6 * 6}
    assert histogram_counts(tmp_path, "inner/activation/0000.0") == {0: 2 * 6 * 6}


def test_hooks_of_a_phase_are_removed_when_it_raises_or_a_step_ends_in_it(tmp_path: Path) -> None:
    model, recorder = mlp(), Recorder()
    train = partial(training(), model)
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=2) as logger:
        with logger.phase("warm-up"):
            assert len([*train(None)]) == 3
        assert len([*train(None)]) == 3
        assert logger.current_step == 6
        with pytest.raises(KeyError), logger.phase("validation"):
            raise KeyError
        assert not any(module._forward_hooks for module in model.modules())
    activations = [len(record.activations) for record in recorder.records]
    assert activations == [0, 0, 0, 0, 3, 0]


def sampling_loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Any]:
    """Run a fixed sample in a phase of its own."""
    sample = torch.linspace(-1, 1, 3 * 8 * 8).view(1, 3, 8, 8)
    loss = lambda model: loss_of(model, torch.randn(4, 3, 8, 8))  # noqa: E731
    for _ in training(loss, 4, partial(torch.optim.SGD, lr=0.0))(model, logger):
        model.eval()
        with torch.no_grad(), logger.phase("sample") if logger else nullcontext():
            yield model(sample)
        model.train()
        yield from (parameter.grad for parameter in model.parameters())


def test_pictures_of_a_phase_are_those_of_its_input_at_each_step(tmp_path: Path) -> None:
    def make() -> nn.Module:
        layers = nn.Conv2d(3, 4, 3), nn.Dropout(), nn.Flatten(), nn.Linear(4 * 36, 2)
        return nn.Sequential(*layers)

    assert_left_alone(make, sampling_loop, tmp_path, every_n_steps=2)
    board = load(tmp_path)
    for tag in ("feature_maps/0000.0", "input"):
        of_sample = board.Tensors(f"sample/{tag}")
        assert [event.step for event in of_sample] == [1, 2, 3, 4]
        assert len({event.tensor_proto.string_val[2] for event in of_sample}) == 1
        assert len({event.tensor_proto.string_val[2] for event in board.Tensors(tag)}) == 2


class Adjoint(torch.autograd.Function):
    """Euler steps as ``torchdiffeq.odeint_adjoint`` takes them: the pass backwards runs the
    function again, and differentiates each call by ``autograd.grad``.
    """

    @staticmethod
    def forward(ctx: Any, function: nn.Module, y: Tensor, *parameters: Tensor) -> Tensor:
        for _ in range(4):
            y = y + function(y) / 4
        ctx.function = function
        ctx.save_for_backward(y, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, adjoint: Tensor) -> Any:
        y, *parameters = ctx.saved_tensors
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for _ in range(4):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                slope = ctx.function(y)
            of_y, *grads = torch.autograd.grad(slope, (y, *parameters), adjoint)
            sums = [total + grad / 4 for total, grad in zip(sums, grads, strict=True)]
            y, adjoint = y - slope / 4, adjoint + of_y / 4
        return None, adjoint, *sums


def flow() -> nn.Module:
    return Applied(
        lambda m, x: m.after(Adjoint.apply(m.slope, m.before(x), *m.slope.parameters())),
        before=nn.Linear(4, 6), after=nn.Linear(6, 2),
        slope=nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
    )  # fmt: skip


def test_a_function_that_only_runs_in_the_backward_pass_has_no_activation_gradients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = assert_left_alone(flow, training(), tmp_path)
    for record in outcome.full:
        assert {name: record.activations[name].calls for name in record.activations} == {
            "before": 1, "after": 1, "slope.0": 4, "slope.1": 4,
        }  # fmt: skip
        assert set(record.activation_grads) == {"before", "after"}
        assert set(record.grads) == {name for name, _ in outcome.model.named_parameters()}
    [line] = [record for record in caplog.records if record.name == "telemetry"]
    assert "activation gradients of slope.0, slope.1 are" in line.getMessage()


def test_feature_maps_of_selectively_checkpointed_convolutions_are_recorded(tmp_path: Path) -> None:
    """Pictures are copied inside of the region whose operations are cached."""

    def make() -> nn.Module:
        block = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3))
        return Applied(lambda m, x: selective_checkpoint(m.block, x), block=block)

    loop = training(lambda model: loss_of(model, torch.randn(6, 1, 8, 8)))
    outcome = assert_left_alone(make, loop, tmp_path)
    assert list(outcome.full[0].activations) == ["block.0", "block.1", "block.2"]
    assert list(outcome.full[0].feature_maps) == ["block.0", "block.2"]


def test_lbfgs_is_logged_at_its_first_evaluation(tmp_path: Path) -> None:
    def loop(model: Any, logger: HookLogger | None) -> Iterator[Tensor]:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        for _ in range(3):
            x = batch()
            calls = itertools.count()

            def closure(x: Tensor = x, calls: Iterator[int] = calls) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                next(calls)
                return loss

            before = model[0].weight.detach().clone()
            yield optimizer.step(closure)
            assert next(calls) > 1
            moved = model[0].weight.detach() - before
            expected.append(float(moved.norm() / before.norm()))

    expected: list[float] = []
    outcome = assert_left_alone(mlp, loop, tmp_path)
    assert [record.step for record in outcome.full] == [0, 1, 2]
    for record, ratio in zip(outcome.full, expected[3:], strict=True):
        assert record.activations["0"].calls == 1
        assert record.activation_grads["0"].calls == 1
        assert record.total_grad_norm == pytest.approx(record.total_grad_norm_before_clipping)
        assert record.update_ratios["0.weight"] == pytest.approx(ratio, rel=1e-4)


def test_parameters_without_an_optimizer_do_not_delay_the_step(tmp_path: Path) -> None:
    """A head is trained, but the rest is not frozen and its gradients are never cleared."""

    def loop(model: Any, logger: HookLogger | None) -> Iterator[Tensor]:
        optimizer = lambda _: torch.optim.SGD(model.second.parameters(), lr=0.1)  # noqa: E731
        return training(optimizer=optimizer)(model, logger)

    outcome = assert_left_alone(TwoParts, loop, tmp_path)
    assert [record.step for record in outcome.full] == [0, 1, 2]
    assert [record.activations["first"].calls for record in outcome.full] == [1, 1, 1]
    expected = [[False, False, True, True]] * 3
    assert [record.grad_present.tolist() for record in outcome.full] == expected
    assert [record.clipped_fraction for record in outcome.full] == [0] * 3


def test_steps_of_a_second_optimizer_are_counted_once_the_first_has_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        """Two stages of training; the first stage's optimizer lives on."""
        optimizers = [sgd(model), torch.optim.Adam(model.parameters(), lr=1e-3)]
        for optimizer, count in zip(optimizers, (2, 25), strict=True):
            yield from training(steps=count, optimizer=lambda _, made=optimizer: made)(model, None)

    outcome = assert_left_alone(mlp, loop, tmp_path, every_n_steps=4)
    assert "Adam steps more often than SGD" in caplog.text
    assert [record.step for record in outcome.records] == list(range(2 + 25))


def test_a_gan_is_watched_by_two_loggers(tmp_path: Path) -> None:
    def gan() -> nn.Module:
        generator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        return nn.ModuleDict({"g": generator, "d": mlp()})

    recorders = {"g": Recorder(), "d": Recorder()}

    def loop(model: Any, logger: HookLogger | None) -> Iterator[Tensor]:
        g, d = model.children()
        g_optimizer = torch.optim.Adam(g.parameters(), lr=0.01)
        d_optimizer = torch.optim.Adam(d.parameters(), lr=0.01)
        if logger is not None:
            logger.remove()
            loggers = [
                HookLogger(part, tmp_path / name, alerts=[recorders[name]], every_n_steps=1)
                for name, part in model.named_children()
            ]
        for _ in range(3):
            fake = g(batch())
            d_loss = d(batch()).mean() - d(fake.detach()).mean()
            d_optimizer.zero_grad()
            d_loss.backward()
            d_optimizer.step()
            g_loss = d(fake).mean()
            g_optimizer.zero_grad()
            g_loss.backward()
            g_optimizer.step()
            yield d_loss
            yield g_loss
        if logger is not None:
            for each in loggers:
                each.close()

    assert_left_alone(gan, loop, tmp_path)
    g_records, d_records = (recorder.records for recorder in recorders.values())
    assert [record.step for record in g_records] == [0, 1, 2]
    assert [record.activations["0"].calls for record in g_records] == [1, 1, 1]
    assert [record.activation_grads["2"].calls for record in g_records] == [1, 1, 1]
    # From the second step on, the generator's pass also runs through the discriminator.
    assert [record.activations["0"].calls for record in d_records] == [2, 3, 3]


def test_an_optimizer_of_two_models_ends_the_steps_of_the_models_that_it_has() -> None:
    encoder, decoder = mlp(), nn.Linear(2, 4)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=0.01)
    with capture_run(encoder) as first, capture_run(decoder) as second:
        decoder(torch.randn(6, 2)).sum().backward()
        optimizer.step()
        assert not first.records
        optimizer.add_param_group({"params": encoder.parameters()})
        for _ in range(2):
            x = batch()
            optimizer.zero_grad()
            (decoder(encoder(x)) - x).square().mean().backward()
            optimizer.step()
    assert [len(record.grads) for record in first.records] == [4] * 2
    assert [len(record.grads) for record in second.records] == [2] * 3
    assert first.records[0].grad_present.all()
    assert second.records[0].grad_present.all()
    assert second.records[1].activations[""].calls == 1


class SeenByDispatch(TorchDispatchMode):
    seen: list[str]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class SeenByFunction(TorchFunctionMode):
    seen: list[str]
    __torch_function__ = SeenByDispatch.__torch_dispatch__


@pytest.mark.parametrize("every_n_steps", [1, 100])
@pytest.mark.parametrize("mode", [SeenByDispatch, SeenByFunction])
def test_the_callers_modes_receive_no_operations_of_the_logger(
    tmp_path: Path, mode: Any, every_n_steps: int
) -> None:
    """Selective checkpointing is such a mode, and so are profilers and a default device."""

    def make() -> nn.Module:  # the last output is too large to be copied
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 4000))

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[str]:
        optimizer = sgd(model)
        for _ in range(3):
            x, watching = torch.randn(6, 1, 8, 8), mode()
            watching.seen = []
            with watching:
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
            yield from watching.seen

    outcome = assert_left_alone(make, loop, tmp_path, every_n_steps=every_n_steps)
    assert outcome.full[-1].activation_grads["2"].calls == 1
    assert outcome.yielded
