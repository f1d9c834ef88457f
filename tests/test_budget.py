"""The budget keeps telemetry's own time within its share, and measures as much as that allows."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.budget import MAX_PARTS, Budget, Stopwatch, Turn

LAYERS = 100


@dataclass(kw_only=True)
class Run:
    """A training on a simulated clock: what each kind of step costs, in seconds."""

    bare_s: float
    full_s: float
    light_s: float = 0.0
    fixed_s: float = 0.0  # of a measurement, however few layers it takes
    known: bool = True  # whether own time is told apart, as it is not on an accelerator
    every: int = 1
    steps: int = 0
    norms_taken: int = 0
    own_s: float = 0.0
    trained_s: float = 0.0
    measured: list[tuple[int, Turn]] = field(default_factory=list)

    def go_on(self, budget: Budget, count: int) -> None:
        for step in range(self.steps, self.steps + count):
            full = step % self.every == 0 and budget.affords_full()
            norms = full or budget.affords_norms()
            own_s = self.light_s * norms
            if full:
                turn = budget.begin_full(LAYERS)
                own_s = self.fixed_s + self.full_s / turn.parts
                self.measured.append((step, turn))
            self.norms_taken += norms
            self.own_s += own_s
            self.trained_s += self.bare_s
            budget.completed(
                step,
                full=full,
                norms=norms,
                step_s=self.bare_s + own_s,
                own_s=own_s if self.known else None,
            )
        self.steps += count

    @property
    def overhead(self) -> float:
        return self.own_s / self.trained_s


@given(
    bare_s=st.floats(1e-3, 1),
    full_share=st.floats(0.001, 20),
    light_share=st.floats(0, 0.02),
    max_overhead=st.floats(0.005, 0.5),
    every=st.integers(1, 20),
)
def test_a_run_stays_within_the_budget_once_the_first_measurement_is_paid_for(
    bare_s: float, full_share: float, light_share: float, max_overhead: float, every: int
) -> None:
    run = Run(bare_s=bare_s, full_s=full_share * bare_s, light_s=light_share * bare_s, every=every)
    budget = Budget(max_overhead=max_overhead, every_n_steps=every)
    run.go_on(budget, 1)
    paid_for = False
    for _ in range(1000):
        run.go_on(budget, 1)
        paid_for = paid_for or run.overhead <= max_overhead
        if paid_for:
            one_too_many = run.light_s / run.trained_s  # of norms, after a full measurement
            assert run.overhead <= max_overhead * (1 + 1e-9) + one_too_many
        assert len(run.measured) == 1 or paid_for


def test_what_is_cheap_enough_is_measured_as_often_as_asked_for() -> None:
    run = Run(bare_s=0.1, full_s=0.004, every=10)
    budget = Budget(max_overhead=0.01, every_n_steps=10)
    run.go_on(budget, 1000)
    assert [step for step, _ in run.measured] == list(range(0, 1000, 10))
    assert {turn for _, turn in run.measured} == {Turn()}
    assert budget.news() is None


def test_the_interval_is_stretched_no_further_than_needed() -> None:
    run = Run(bare_s=0.1, full_s=0.02, every=3)  # 20 steps earn it
    budget = Budget(max_overhead=0.01, every_n_steps=3)
    run.go_on(budget, 3000)
    steps = [step for step, _ in run.measured]
    gaps = [after - before for before, after in pairwise(steps)]
    assert gaps[0] == 42  # it pays for the first, too
    assert set(gaps[1:]) <= {18, 21}
    assert all(step % 3 == 0 for step in steps)
    assert run.overhead == pytest.approx(0.01, rel=0.02)


def test_layers_take_turns_when_the_interval_would_be_too_long() -> None:
    run = Run(bare_s=0.01, full_s=0.04, every=10)  # 400 steps earn it; 100 is the longest
    budget = Budget(max_overhead=0.01, every_n_steps=10)
    run.go_on(budget, 10_000)
    turns = [turn for _, turn in run.measured[-8:]]
    assert {turn.parts for turn in turns} == {4}
    assert [turn.first for turn in turns[:4]] == [
        (turns[0].first + place) % 4 for place in range(4)
    ]
    for layer in range(10):
        assert sum(turn.takes(layer) for turn in turns) == 2


def test_all_layers_are_measured_together_again_when_training_gets_slower() -> None:
    run = Run(bare_s=0.01, full_s=0.04, every=10)
    budget = Budget(max_overhead=0.01, every_n_steps=10)
    run.go_on(budget, 5000)
    assert run.measured[-1][1].parts > 1
    run.bare_s = 1.0
    run.go_on(budget, 500)
    assert run.measured[-1][1] == Turn()
    assert len([step for step, _ in run.measured if step >= 5100]) == 40


def test_parts_do_not_grow_without_end_where_fewer_layers_are_no_cheaper() -> None:
    run = Run(bare_s=0.001, full_s=0.0, fixed_s=0.1)
    budget = Budget(max_overhead=0.01, every_n_steps=1)
    run.go_on(budget, 50_000)
    assert 1 < run.measured[-1][1].parts <= MAX_PARTS
    assert run.overhead <= 0.01 * (1 + 1e-9)
    assert len(run.measured) == 4


def test_norms_take_half_of_the_budget_and_are_skipped_beyond_that() -> None:
    run = Run(bare_s=0.01, full_s=0.01, light_s=0.001)
    budget = Budget(max_overhead=0.01, every_n_steps=10)
    run.go_on(budget, 10_000)
    assert run.norms_taken - len(run.measured) == pytest.approx(10_000 / 20, rel=0.02)
    assert len(run.measured) == pytest.approx(10_000 / 50, rel=0.05)  # quarters
    assert run.overhead <= 0.01 * (1 + 1e-9)
    news = budget.news()
    assert news is not None
    assert "gradient norms about every 20 steps" in news


def test_there_are_no_more_parts_than_layers() -> None:
    run = Run(bare_s=0.001, full_s=1.0)
    budget = Budget(max_overhead=0.01, every_n_steps=1)
    run.go_on(budget, 200_000)
    assert run.measured[-1][1].parts == MAX_PARTS
    assert budget.begin_full(3).parts == 3


def test_nothing_is_affordable_until_a_measurement_is_settled() -> None:
    budget = Budget(max_overhead=0.5, every_n_steps=1)
    assert budget.affords_full()
    budget.begin_full(LAYERS)
    budget.completed(0, full=False, step_s=1e6, own_s=0.0)
    assert not budget.affords_full()
    budget.completed(1, full=True, step_s=1.0, own_s=0.5)
    assert budget.affords_full()


def test_where_own_time_is_unknown_it_is_what_full_steps_take_longer() -> None:
    known = Run(bare_s=0.1, full_s=0.02, every=5)
    unknown = Run(bare_s=0.1, full_s=0.02, every=5, known=False)
    for run in (known, unknown):
        budget = Budget(max_overhead=0.01, every_n_steps=5)
        run.go_on(budget, 2000)
        assert budget.scalars()["telemetry/overhead"] == pytest.approx(0.01, rel=0.05)
    assert len(unknown.measured) == pytest.approx(len(known.measured), abs=2)


def test_what_it_did_is_given_as_scalars_and_said_once() -> None:
    run = Run(bare_s=0.01, full_s=0.04, every=10)
    budget = Budget(max_overhead=0.01, every_n_steps=10)
    assert budget.scalars() == {"telemetry/every_n_steps": 10.0}
    run.go_on(budget, 5000)
    scalars = budget.scalars()
    assert scalars["telemetry/overhead"] == pytest.approx(run.overhead)
    steps = [step for step, _ in run.measured]
    assert scalars["telemetry/every_n_steps"] == steps[-1] - steps[-2]
    news = budget.news()
    assert news is not None
    assert news.startswith("to stay within max_overhead=0.01: measuring about every 100 steps")
    assert "one in 4 layers at a time" in news
    assert budget.news() is None


@pytest.mark.parametrize("wrong", [0, -0.1, 1.5, float("nan")])
def test_a_share_that_cannot_be_meant_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"HookLogger\(max_overhead=.*must be above 0"):
        Budget(max_overhead=wrong, every_n_steps=1)


@pytest.mark.parametrize("wrong", ["1%", True, None])
def test_a_share_that_is_no_number_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"HookLogger\(max_overhead=.*must be a number"):
        Budget(max_overhead=wrong, every_n_steps=1)  # type: ignore[arg-type]


def test_the_stopwatch_adds_up_this_threads_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.5, 7.0, 7.25, 8.0, 8.5, 9.0])
    monkeypatch.setattr("time.thread_time", lambda: next(times))
    watch = Stopwatch()
    with watch, watch:
        pass
    with watch:
        pass
    assert watch.take() == 0.75
    assert watch.take() == 0.0
    with watch:
        assert watch.take() == 0.5
    assert watch.take() == 0.5


def test_the_stopwatch_ignores_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.0])
    monkeypatch.setattr("time.thread_time", lambda: next(times))
    watch = Stopwatch()

    def run_elsewhere() -> None:
        with watch:
            pass

    with watch:
        thread = threading.Thread(target=run_elsewhere)
        thread.start()
        thread.join()
    assert watch.take() == 2.0
