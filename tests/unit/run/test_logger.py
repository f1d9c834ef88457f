"""HookLogger: the steps it counts, its life cycle, its writers and what it survives."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from telemetry import HookLogger
from tests.helpers.loops import (
    batches,
    is_hooked,
    load,
    mlp,
    scalars,
    small_cnn,
    train,
    written,
)
from tests.helpers.paths import ROOT
from tests.helpers.scripts import run_script
from tests.helpers.twins import Recorder

# --- steps ---------------------------------------------------------------------------------------


def test_the_first_optimizer_of_this_model_counts_the_steps(tmp_path: Path) -> None:
    model, other, recorder = mlp(), mlp(), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder]) as logger:
        train(other, steps=3)
        assert logger.current_step == 0
        train(model, steps=2)
        assert logger.current_step == 2
    assert [record.step for record in recorder.records] == [0, 1]


def test_logger_step_counts_steps_without_an_optimizer(tmp_path: Path) -> None:
    model, recorder = mlp(), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=2) as logger:
        for _ in range(3):
            model(torch.rand(4, 3)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            logger.step()
            model.zero_grad()
    assert [record.step for record in recorder.records] == [0, 1, 2]
    assert [record.full for record in recorder.records] == [True, False, True]
    assert recorder.records[2].activations
    assert all(record.total_grad_norm > 0 for record in recorder.records)


# --- life cycle ----------------------------------------------------------------------------------


def test_hooks_are_on_the_model_only_at_full_steps_and_removed_when_the_body_raises(
    tmp_path: Path,
) -> None:
    model, hooked = small_cnn(), []
    with suppress(KeyError), HookLogger(model, tmp_path, every_n_steps=3):
        hooked += [is_hooked(model)]
        hooked += [is_hooked(model) for _ in batches(model, steps=6)]
        raise KeyError
    assert hooked == [True, False, False, True, False, False, True]
    assert not is_hooked(model)


def test_removing_and_attaching_again_continues_the_count(tmp_path: Path) -> None:
    model, recorder = mlp(), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder]) as logger:
        train(model, steps=2)
        logger.remove()
        assert not is_hooked(model)
        logger.batch([1])
        train(model, steps=2)
        logger.attach()
        train(model, steps=1)
    assert [record.step for record in recorder.records] == [0, 1, 2]


def test_a_closed_logger_cannot_be_attached(tmp_path: Path) -> None:
    model = mlp()
    logger = HookLogger(model, tmp_path)
    logger.close()
    logger.close()  # twice raises nothing
    with pytest.raises(ValueError, match=r"attach\(\): the logger is closed; make a new one"):
        logger.attach()
    with pytest.raises(ValueError, match=r"^with HookLogger: the logger is closed"), logger:
        pass


def test_calls_after_close_are_reported_once_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    with HookLogger(model, tmp_path) as logger:
        train(model, steps=1)
    for _ in range(2):
        logger.log(test_accuracy=0.9)
        logger.batch([1])
        logger.hparams({"lr": 0.1})
        with logger.phase("validation"):
            model(torch.randn(2, 3))
    names = [re.search(r"(\w+)\(\) after close\(\)", text) for text in caplog.messages]
    assert [name and name[1] for name in names] == ["log", "batch", "hparams", "phase"]


def test_two_loggers_of_one_model_record_at_their_own_intervals(tmp_path: Path) -> None:
    model, recorders = mlp(), [Recorder(), Recorder()]
    with (
        HookLogger(model, tmp_path / "a", alerts=[recorders[0]], every_n_steps=1),
        HookLogger(model, tmp_path / "b", alerts=[recorders[1]], every_n_steps=2),
    ):
        train(model, steps=3)
    one, two = (recorder.records for recorder in recorders)
    assert [record.full for record in one] == [True, True, True]
    assert [record.full for record in two] == [True, False, True]
    assert one[2].activations["0"].sketch.sum == two[2].activations["0"].sketch.sum


def test_closing_on_two_threads_at_once_raises_nothing(tmp_path: Path) -> None:
    model = mlp()
    for number in range(5):
        logger = HookLogger(model, tmp_path / str(number), alerts=())
        train(model, steps=2)
        with ThreadPoolExecutor(4) as pool:
            for closed in [pool.submit(logger.close) for _ in range(4)]:
                closed.result()
        assert len(scalars(tmp_path / str(number))) == 2


@pytest.mark.slow
def test_a_notebook_cell_can_run_again_and_continues_the_steps(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """The cell runs with the same model, a new one, and after a restart of the kernel."""
    page = (ROOT / "docs" / "howto" / "trainers.md").read_text(encoding="utf-8")
    code = page.partition("## Notebooks")[2].partition("```python\n")[2].partition("```")[0]
    code = code.replace("runs/first", str(tmp_path))
    cell = {"HookLogger": HookLogger, "train": lambda model: train(model, steps=3)}
    cell["model"] = mlp()
    exec(code, cell)
    exec(code, cell)
    cell["model"] = mlp()
    exec(code, cell)
    cell["logger"].close()
    after_restart = f"""
from telemetry import HookLogger
from tests.helpers.loops import mlp, train as train_steps
train = lambda model: train_steps(model, steps=3)
model = mlp()
{code}
"""
    run_script(tmp_path_factory.mktemp("script"), after_restart)
    steps = [step for _, step, value in written(tmp_path) if value.tag.endswith("grad_norm/total")]
    assert steps == list(range(12))
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "replaces the one that watched the same model" in warning.getMessage()


# --- a writer of the user ------------------------------------------------------------------------


def test_two_loggers_may_share_a_writer(tmp_path: Path) -> None:
    models, writer = [mlp(), mlp()], SummaryWriter(tmp_path)
    loggers = [HookLogger(model, writer, alerts=()) for model in models]
    for model in models:
        train(model, steps=4)
    for logger in loggers:
        logger.close()
    writer.close()
    steps = [event.step for event in load(tmp_path).Scalars("grad_norm/total")]
    assert sorted(steps) == [0, 0, 1, 1, 2, 2, 3, 3]


# --- disabled ------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_disabled_logger_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    monkeypatch.setenv("TELEMETRY_DISABLED", "1" if by_variable else "0")
    model, log_dir = mlp(), tmp_path / "run"
    threads = threading.active_count()
    logger = HookLogger(model, log_dir, every_n_steps=1, on_alert="stop", enabled=by_variable)
    with logger:
        for _ in batches(model, steps=3):
            assert not is_hooked(model)
            logger.log(loss=torch.nan, size=torch.ones(3))
            logger.batch([1])
            with logger.phase("validation"):
                model(torch.randn(2, 3))
        logger.step()
        logger.hparams({"lr": 0.1})
        logger.flush()
    logger.load_state_dict({"step": 7})
    assert (logger.current_step, logger.state_dict()) == (7, {"step": 7})
    assert (logger.alerts, logger.should_stop, logger.log_dir) == ((), False, str(log_dir))
    assert not log_dir.exists()
    assert threading.active_count() == threads
    logger.attach()
    logger.remove()
    logger.close()
    with pytest.raises(RuntimeError, match="of the user"), logger:
        raise RuntimeError("of the user")


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_logger_is_disabled_if_the_system_refuses_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, allowed: int
) -> None:
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with HookLogger(mlp(), tmp_path / "run", first_step=3) as logger:
        logger.log(loss=1.0)
    assert (logger.current_step, logger.log_dir) == (3, str(tmp_path / "run"))
    assert ["logger is disabled" in message for message in caplog.messages] == [True]
    assert not any(thread.is_alive() for thread in started)
