"""A run that is repeated on a busy machine measures the same steps and gives the same alerts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from interrupted_runs import RUNS, STEPS
from plain_events import EventAccumulator
from sklearn.datasets import load_digits
from torch.nn import functional as F

from telemetry import Alert, HookLogger

REPETITIONS = 3
HOG = "print('busy', flush=True)\nwhile True: pass"


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Two processes that compute all the time."""
    hogs = [subprocess.Popen([sys.executable, "-c", HOG], stdout=subprocess.PIPE) for _ in range(2)]
    for hog in hogs:
        assert hog.stdout is not None
        assert hog.stdout.readline() == b"busy\n"
    yield
    for hog in hogs:
        hog.kill()
        hog.communicate()


def train(name: str, log_dir: Path) -> tuple[tuple[Alert, ...], list[int]]:
    """Alerts of a run, and the steps that were measured in full; nobody waits for the rules."""
    run, digits = RUNS[name], load_digits()
    images, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    model = run.model()
    optimizer = torch.optim.SGD(model.parameters(), run.lr, momentum=0.9)
    order = torch.Generator().manual_seed(0)
    with HookLogger(model, log_dir, every_n_steps=100, images=False) as logger:
        for step in range(2 * STEPS):
            batch = torch.randint(0, len(images), (32,), generator=order)
            inputs = run.disturb(step, model, optimizer, images[batch])
            loss = F.cross_entropy(model(inputs), labels[batch])
            logger.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        alerts = logger.alerts
    curves = EventAccumulator(str(log_dir)).Reload()
    return alerts, [point.step for point in curves.Scalars("depth/log10_grad_norm/median")]


@pytest.mark.usefixtures("busy_machine")
@pytest.mark.parametrize("name", ["exploding", "saturated", "dead", "diverging", "not_learning"])
def test_measures_the_same_steps_and_gives_the_same_alerts(name: str, tmp_path: Path) -> None:
    alerts, full = train(name, tmp_path / "first")
    assert alerts
    assert set(full) - {0, 100}  # rules have asked for more
    for repetition in range(1, REPETITIONS):
        again, full_again = train(name, tmp_path / str(repetition))
        assert full_again == full
        assert repr(again) == repr(alerts)  # every digit of every number
