"""End of a step: with any optimizers, a record has the tensors of this step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from telemetry import HookLogger
from telemetry.testing import capture_run
from tests.helpers.hand import TwoParts, assert_logged, by_hand
from tests.helpers.twins import Loop, assert_left_alone, descend

BATCHES = 14


# Parts in the order of their steps: name, interval in batches, offset in batches.
SCHEDULES: dict[str, list[tuple[str, int, int]]] = {
    "one optimizer": [("", 1, 0)],
    "one part first": [("first", 1, 0), ("second", 1, 0)],
    "the other part first": [("second", 1, 0), ("first", 1, 0)],
    "the rare one last": [("first", 1, 0), ("second", 4, 3)],
    "the rare one first": [("second", 4, 3), ("first", 1, 0)],
    "the rare one last, in the first batch": [("first", 1, 0), ("second", 4, 0)],
    "the rare one first, in the first batch": [("second", 4, 0), ("first", 1, 0)],
}


def training_by(name: str, seen: list[int]) -> Loop:
    """Return a loop that yields when a step is over, and notes the logger's step after a batch."""
    schedule = SCHEDULES[name]
    ends = [place for place, (_, every, _) in enumerate(schedule) if every == 1][-1]

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[None]:
        parts = [model.get_submodule(part) for part, *_ in schedule]
        optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in parts]
        for batch in range(BATCHES):
            model(torch.randn(3, 4)).square().mean().backward()
            for place, (_, every, at) in enumerate(schedule):
                if batch % every == at:
                    optimizers[place].step()
                    optimizers[place].zero_grad()
                # Later optimizers belong to the next step, but for the first, which stays open.
                if place == ends and batch:
                    yield
            if not batch:
                yield
            if logger is not None:
                seen.append(logger.current_step)

    return loop


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_holds_its_batch_and_the_gradients_that_were_used(tmp_path: Path, name: str) -> None:
    seen: list[int] = []
    records = assert_left_alone(TwoParts, training_by(name, seen), tmp_path).records
    # Only later batches show that the second optimizer does not step at each.
    settled = 5 if name == "the rare one last, in the first batch" else 0
    assert [record.step for record in records] == list(range(BATCHES))
    first = max(settled, 1)  # in the first batch there may be gradients for another optimizer
    assert seen[first:] == list(range(first + 1, BATCHES + 1))
    steps = by_hand(TwoParts, training_by(name, []))
    for record, step in zip(records[settled:], steps[settled:], strict=True):
        assert_logged(record, step)


def test_the_optimizer_that_is_named_ends_the_steps() -> None:
    model = TwoParts()
    first, second = (torch.optim.SGD(part.parameters(), 0.1) for part in model.children())
    ends = []
    with capture_run(model, rules=(), optimizer=second) as run:
        for batch in range(BATCHES):
            descend(model, torch.randn(3, 4), *([first, second] if batch % 4 == 3 else [first]))
            ends.append(len(run.records))
    assert [record.step for record in run.records] == [0, 1, 2]
    assert ends == [batch // 4 for batch in range(1, BATCHES + 1)]


def test_each_parameter_has_the_rate_of_its_group() -> None:
    model = TwoParts()
    first = torch.optim.SGD([{"params": [p]} for p in model.first.parameters()], 0.1)
    first.param_groups[1]["lr"] = 0.3
    model.second.weight.requires_grad_(False)
    second = torch.optim.SGD([model.second.bias], 0.2)
    with capture_run(model, rules=()) as run:
        descend(model, torch.randn(3, 4), first, second, steps=3)
    for record in run.records[1:]:
        assert record.learning_rates == (0.1, 0.3, 0.2)
        names = [parameter.name for parameter in record.layout.parameters]
        groups = dict(zip(names, record.groups.tolist(), strict=True))
        expected = {"first.weight": 0, "first.bias": 1, "second.weight": -1, "second.bias": 2}
        assert groups == expected


# --- optimizers around others --------------------------------------------------------------------


class Ahead:
    """Lookahead, https://arxiv.org/abs/1907.08610: every other step goes half as far."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.steps = base, 0
        self.slow = [(p, p.detach().clone()) for g in base.param_groups for p in g["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.steps += 1
        with torch.no_grad():
            for fast, slow in self.slow if self.steps % 2 == 0 else ():
                fast.copy_(slow.lerp_(fast, 0.5))
        return loss


class AheadOptimizer(Ahead, Optimizer):
    """Lookahead as an optimizer with its own state."""

    def __init__(self, base: Optimizer) -> None:
        Optimizer.__init__(self, base.param_groups, base.defaults)
        Ahead.__init__(self, base)

    step = Ahead.step  # type: ignore[assignment]


class Both(Optimizer):
    """Optimizer that steps biases and calls another optimizer for the rest."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([p for p in model.parameters() if p.dim() == 1], {"lr": 0.1})
        self.base = AdamW([p for p in model.parameters() if p.dim() == 2], 0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step()
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1)


def adam(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), 0.01)


WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "a wrapper": lambda model: AheadOptimizer(adam(model)),
    "a wrapper of a wrapper": lambda model: AheadOptimizer(AheadOptimizer(adam(model))),
    "a wrapper that holds others": Both,
}


@pytest.mark.parametrize(
    ("name", "closure"),
    [*((name, False) for name in WRAPPED), *((n, True) for n in [*WRAPPED][:2])],
)
def test_an_optimizer_that_another_one_calls_counts_nothing_twice(name: str, closure: bool) -> None:
    torch.manual_seed(0)
    model = TwoParts()
    optimizer = WRAPPED[name](model)
    truth: list[dict[str, float]] = []

    def evaluated() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        return loss

    with capture_run(model, rules=()) as run:
        for _ in range(6):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.step(evaluated) if closure else (evaluated(), optimizer.step())
            moved = {n: p.detach() - before[n] for n, p in model.named_parameters()}
            truth.append({n: float(moved[n].norm() / before[n].norm()) for n in moved})
    holds_others = name == "a wrapper that holds others"
    assert [record.step for record in run.records] == [*range(6)]
    for record, ratios in zip(run.records, truth, strict=True):
        assert record.update_ratios == pytest.approx(ratios, rel=1e-4)
        sizes = {p.name: p.size for p in record.layout.parameters}
        for tensors in (record.weights, record.grads):
            assert {name: t.sketch.count for name, t in tensors.items()} == sizes
        with_moments = {n for n in sizes if "weight" in n or not holds_others}
        assert {*record.second_moments} == with_moments
        assert record.held.all()
        assert len(record.learning_rates) == 1 + holds_others


def test_a_named_inner_optimizer_counts_the_steps_of_its_wrapper() -> None:
    model = TwoParts()
    base = adam(model)
    optimizer = AheadOptimizer(base)
    with capture_run(model, rules=(), optimizer=base, every_n_steps=3) as run:
        descend(model, torch.ones(3, 4), optimizer, steps=4)
    assert [record.step for record in run.records] == [0, 1, 2, 3]
    assert [len(record.update_ratios) for record in run.records] == [4, 0, 0, 4]


def test_after_a_wrapper_raises_the_inner_optimizer_is_counted() -> None:
    model = TwoParts()
    base = adam(model)
    optimizer = AheadOptimizer(base)
    optimizer.slow = None  # type: ignore[assignment]
    with capture_run(model, rules=()) as run:
        for index in range(10):
            model(torch.ones(3, 4)).square().mean().backward()
            with contextlib.suppress(TypeError):
                (base if index > 1 else optimizer).step()
    assert [record.step for record in run.records] == list(range(9))
    assert all(len(record.grads) == 4 for record in run.records)


def test_a_wrapper_that_is_not_an_optimizer_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for wrapped in (False, True):
        model = TwoParts()
        optimizer: Any = Ahead(adam(model)) if wrapped else adam(model)
        with HookLogger(model, tmp_path / str(wrapped), alerts=(), every_n_steps=2):
            descend(model, torch.ones(3, 4), optimizer, steps=6)
        messages = [r for r in caplog.records if "AdamW.step() alone" in r.getMessage()]
        assert len(messages) == wrapped
