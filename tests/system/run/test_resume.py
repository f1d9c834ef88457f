"""Resumed runs: the step, the alerts and the curves that TensorBoard shows."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import telemetry
from telemetry import Alert, HookLogger, Rule, StepRecord
from tests.helpers.applied import Applied
from tests.helpers.interrupted_runs import RUNS
from tests.helpers.interrupted_runs import train as train_interrupted
from tests.helpers.loops import load, mlp, scalars, train
from tests.helpers.paths import ROOT
from tests.helpers.rules import rule
from tests.helpers.scripts import run_script
from tests.helpers.twins import Recorder


def leave(
    log_dir: Path | SummaryWriter,
    steps: int,
    state: dict[str, Any] | None = None,
    model: nn.Module | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train for some steps, after a state if one is given; return the state at the end."""
    model = model or mlp()
    with HookLogger(model, log_dir, **options) as logger:
        if state is not None:
            logger.load_state_dict(state)
        train(model, steps)
        return logger.state_dict()


def losses(log_dir: Path) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in load(log_dir).Scalars("loss")]


# --- the alerts continue -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alerts(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Alerts of uninterrupted runs, and of a fresh process from each checkpoint on."""
    log_dir = tmp_path_factory.mktemp("runs")
    whole, saved = {}, {}
    for name, run in RUNS.items():
        whole[name], saved[name] = train_interrupted(run, log_dir / name)
    torch.save(saved, log_dir / "checkpoints.pt")
    script = (ROOT / "tests" / "helpers" / "interrupted_runs.py").read_text()
    resumed, _ = run_script(log_dir, script, log_dir / "checkpoints.pt", log_dir)
    return json.loads(json.dumps(whole)), json.loads(resumed)


# In the list of an alert's fields.
STEP, STAGE, KIND, LAYER = map(
    [*Alert.__dataclass_fields__].index, ("step", "stage", "kind", "module_name")
)


@pytest.mark.parametrize(
    ("name", "step"), [(name, step) for name, run in RUNS.items() for step in run.checkpoints]
)
def test_a_resumed_run_raises_the_alerts_of_an_uninterrupted_run(
    alerts: tuple[dict[str, Any], dict[str, Any]], name: str, step: int
) -> None:
    whole, resumed = alerts
    after = [alert for alert in whole[name] if alert[STEP] >= step]
    assert resumed[f"{name} {step} True"] == after
    assert name != "healthy" or resumed[f"healthy {step} False"] == []


@pytest.mark.parametrize("name", RUNS)
def test_alerts_are_of_the_fault_and_its_layer_alone(
    alerts: tuple[dict[str, Any], dict[str, Any]], name: str
) -> None:
    started = [alert for alert in alerts[0][name] if alert[STAGE] == "started"]
    assert {alert[KIND]: alert[LAYER] for alert in started} == RUNS[name].alerts


def test_alerts_of_the_runs_escalate_and_resolve(
    alerts: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    stages = {alert[STAGE] for found in alerts[0].values() for alert in found}
    assert stages == {"started", "escalated", "resolved"}


# --- the step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_this_process", [True, False])
def test_steps_after_the_checkpoint_are_hidden(tmp_path: Path, in_this_process: bool) -> None:
    model = mlp()
    with HookLogger(model, tmp_path, every_n_steps=2) as logger:
        train(model, 4)
        state = logger.state_dict()
        train(model, 6)
        if in_this_process:
            logger.load_state_dict(state)
            train(model, 2)
    if not in_this_process:
        leave(tmp_path, 2, state, model, every_n_steps=2)
    assert list(scalars(tmp_path)) == list(range(6))
    layers = telemetry.read(tmp_path).layers
    assert set(layers[layers.statistic == "grad_norm"].step) == set(range(6))


def test_taking_the_state_ends_a_step_pending_on_other_optimizers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    with HookLogger(model, tmp_path) as logger:
        model(torch.rand(8, 3)).sum().backward()
        first.step()  # the second has gradients, too
        before = torch.get_rng_state()
        assert logger.state_dict()["step"] == 1
        assert torch.equal(torch.get_rng_state(), before)
    del second


def test_a_resumed_run_has_the_modules_in_forward_order_at_its_first_step(tmp_path: Path) -> None:
    layers = {"second": nn.Linear(4, 2), "first": nn.Linear(3, 4)}
    model = Applied(lambda m, x: m.second(m.first(x)), **layers)
    recorder = Recorder()
    state = leave(tmp_path / "a", 3, model=model, every_n_steps=5)
    leave(tmp_path / "b", 1, state, model, every_n_steps=5, alerts=[recorder])
    assert [module.name for module in recorder.records[0].layout.modules] == ["first", "second"]


def test_a_loss_of_the_step_in_progress_is_restored(tmp_path: Path) -> None:
    model, recorder = mlp(), Recorder()
    with HookLogger(model, tmp_path / "a") as logger:
        train(model, 2)
        logger.log(loss=0.25)
        state = logger.state_dict()
    leave(tmp_path / "b", 1, state, alerts=[recorder])
    assert recorder.records[0].loss == 0.25


def test_a_loss_that_is_logged_after_the_last_step_stays_in_the_curve(tmp_path: Path) -> None:
    """The optimizer has ended the step, so that it is a loss of the next, which is repeated."""
    model, state = mlp(), dict[str, Any]()
    for _ in range(2):
        with HookLogger(model, tmp_path) as logger:
            if state:
                logger.load_state_dict(state)
            for _ in range(3):
                train(model, 1)
                logger.log(loss=1.5)
            state = state or logger.state_dict()
            train(model, 2)
    assert losses(tmp_path) == [(step, 1.5) for step in range(1, 7)]


# --- what fits -----------------------------------------------------------------------------------


class Counter(Rule):
    """Rule with a state."""

    def __init__(self) -> None:
        self.count = torch.zeros(())

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self.count += 1
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def ignored(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [m.partition("ignored ")[2] for m in caplog.messages if " ignored " in m]


def test_a_custom_rule_with_a_state_is_saved_and_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Counter):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("planted")

    def bare(record: StepRecord) -> Iterable[Alert]:
        return ()

    state = leave(tmp_path / "a", 3, alerts=[Broken(), bare, Counter(), rule("dead_units")])
    assert caplog.text.count("to take the state of the rule 'Broken'") == 1
    torch.save(state, tmp_path / "state.pt")
    counter = Counter()
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    leave(tmp_path / "b", 1, state, alerts=[rule("dead_units"), bare, counter])
    assert counter.count == 4
    assert ignored(caplog) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, {"dead_units": {"fraction": 0.5}}, []),
        (None, {"dead_units": None}, ["default_rules: there is no rule dead_units"]),
        ({"dead_units": None}, None, ["default_rules: dead_units resets"]),
        (None, (), ["there is no rule default_rules"]),
        ((), None, ["default_rules resets"]),
        ([Counter()], (), ["there is no rule Counter"]),
    ],
)
def test_other_rules_restore_matching_fields_and_log_the_rest_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: Any, after: Any, expected: list[str]
) -> None:
    state = leave(tmp_path / "a", 3, alerts=before)
    assert leave(tmp_path / "b", 1, state, alerts=after)["step"] == 4
    assert ignored(caplog) == expected
    assert "telemetry failed" not in caplog.text


def test_a_resumed_run_uses_its_own_thresholds(tmp_path: Path) -> None:
    model, state = mlp(), dict[str, Any]()
    for steps in (1e9, 6):
        settings = {"no_learning": {"steps": steps}}
        with HookLogger(model, tmp_path, every_n_steps=1, alerts=settings) as logger:
            if state:
                logger.load_state_dict(state)
            train(model, 3, lr=0.0)
            state = logger.state_dict()
    assert [(alert.kind, alert.step) for alert in logger.alerts] == [("no_learning", 5)]


def test_a_state_of_another_model_raises_no_alert_and_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = leave(tmp_path / "a", 12, every_n_steps=3)
    state = json.loads(json.dumps(saved))
    assert repr(state) == repr(saved)  # which has NaN in it
    other = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Sequential(nn.Linear(2, 2)))
    leave(tmp_path / "b", 12, state, other, every_n_steps=3)
    assert telemetry.read(tmp_path / "b").alerts == ()
    assert "telemetry failed" not in caplog.text


def damaged(state: dict[str, Any], what: str) -> dict[str, Any]:
    if what == "newer":
        return {**state, "format": 2}
    if what == "without a step":
        return {"format": 1}
    for fields in state["rules"]["default_rules"].values():
        fields.update({name: {"0": [True]} for name in fields})
    return state


@pytest.mark.parametrize(
    ("what", "step", "expected"),
    [
        ("newer", 3, ["the state of the rules: its format 2 is unknown"]),
        ("without a step", 0, ["the step: None", "default_rules resets"]),
        ("other types", 3, ["baseline resets", "dead_units resets", "no_learning resets"]),
    ],
)
def test_a_foreign_state_is_restored_where_its_fields_match(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, step: int, expected: list[str]
) -> None:
    state = damaged(leave(tmp_path / "a", 3), what)
    assert leave(tmp_path / "b", 2, state)["step"] == step + 2
    [line] = ignored(caplog)
    assert all(part in line for part in expected), line
    assert "telemetry failed" not in caplog.text


def test_an_invalid_state_is_refused(tmp_path: Path) -> None:
    logger = HookLogger(mlp(), tmp_path)
    with pytest.raises(TypeError, match=r"must be what state_dict\(\) returned"):
        logger.load_state_dict([1])  # type: ignore[arg-type]
    state = logger.state_dict()
    logger.close()
    with pytest.raises(ValueError, match="closed; make a new one"):
        logger.load_state_dict(state)
    assert logger.state_dict()["step"] == 0


# --- resume=True -------------------------------------------------------------------------------


def auto_step(log_dir: Path | SummaryWriter) -> int:
    model = mlp()
    with HookLogger(model, log_dir, resume=True) as logger:
        return logger.current_step


def test_auto_continues_after_the_last_step_that_counts(tmp_path: Path) -> None:
    assert auto_step(tmp_path) == auto_step(tmp_path / "absent") == 0
    leave(tmp_path, 7)
    assert leave(tmp_path, 2, resume=True)["step"] == 9
    assert list(scalars(tmp_path)) == list(range(9))
    assert auto_step(tmp_path) == 9
    assert auto_step(tmp_path) == 9  # the newest file holds no step
    leave(tmp_path, 2, first_step=4)  # replaces the steps from 4 on
    assert auto_step(tmp_path) == 6
    with pytest.raises(ValueError, match="local directories only, not in memory://run; pass first"):
        auto_step(SummaryWriter("memory://run"))


def test_auto_replaces_the_loss_of_a_step_that_did_not_end(tmp_path: Path) -> None:
    for _ in range(2):
        model = mlp()
        with HookLogger(model, tmp_path, resume=True) as logger:
            for _ in range(3):
                logger.log(loss=1.5)
                train(model, 1)
            logger.log(loss=2.5)
    assert losses(tmp_path) == [(step, 2.5 if step == 6 else 1.5) for step in range(7)]


@pytest.mark.parametrize("content", ["gradients", "activations"])
def test_auto_continues_runs_that_record_only_gradients_or_activations(
    tmp_path: Path, content: str
) -> None:
    leave(tmp_path, 3, measure=content)
    assert auto_step(tmp_path) == 3


def test_auto_takes_the_directory_of_a_writer(tmp_path: Path) -> None:
    for expected in (3, 6):
        with SummaryWriter(tmp_path) as writer:
            assert leave(writer, 3, resume=True)["step"] == expected


def test_auto_tolerates_torn_tails_and_foreign_files(tmp_path: Path) -> None:
    leave(tmp_path, 5, every_n_steps=1)
    [ours] = tmp_path.glob("*tfevents*")
    ours.write_bytes(ours.read_bytes() + b"\x20\0\0\0\0\0\0\0torn" + bytes(50_000))
    with SummaryWriter(tmp_path, filename_suffix=".foreign") as writer:
        for epoch in range(1000):
            writer.add_scalar("loss", 1.0, 1000 * epoch)
        writer.add_text("notes", "grad_norm/total was telemetry/n/ 1e9", 10**9)
    os.mkfifo(tmp_path / "events.out.tfevents.9999999990.fifo")
    (tmp_path / "events.out.tfevents.9999999991.zero").symlink_to("/dev/zero")
    (tmp_path / "events.out.tfevents.9999999992.noise").write_bytes(os.urandom(1 << 20))
    (tmp_path / "events.out.tfevents.9999999993.folder").mkdir()
    assert auto_step(tmp_path) == 5


# --- the directory holds later steps -------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_second_run_from_step_0_is_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path, 6)
    assert warnings_of(caplog) == []
    leave(tmp_path, 3)
    [message] = warnings_of(caplog)
    assert f"{tmp_path} already holds a run up to step 5" in message
    for way_out in ("first_step=6", "resume=True", "load_state_dict()", "another directory"):
        assert way_out in message


def test_a_run_that_sets_its_first_step_or_state_is_not_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = leave(tmp_path, 6)
    leave(tmp_path, 1, first_step=2)
    leave(tmp_path, 1, resume=True)
    leave(tmp_path, 1, state)
    shutil.rmtree(tmp_path)
    leave(tmp_path, 6)
    assert warnings_of(caplog) == []
