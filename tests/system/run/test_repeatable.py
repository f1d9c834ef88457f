"""A repeated run on a busy machine with late answers has the same alerts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from telemetry import Alert, HookLogger
from tests.helpers.interrupted_runs import RUNS, STEPS, Moment

# Ends with its parent, even if that is killed.
HOG = """
import os
parent = os.getppid()
print('busy', flush=True)
while os.getppid() == parent: pass
"""


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


def train(name: str, log_dir: Path) -> tuple[Alert, ...]:
    """Return the alerts of a run that does not wait for them."""
    run, digits = RUNS[name], load_digits()
    images, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    model = run.model()
    optimizer = torch.optim.SGD(model.parameters(), run.lr, momentum=0.9)
    order = torch.Generator().manual_seed(0)
    with HookLogger(model, log_dir, every_n_steps=100, measure="!images") as logger:
        for step in range(4 * STEPS):
            batch = torch.randint(0, len(images), (512,), generator=order)
            # The fault of "dead" stays: steps are so fast that all of it may pass unmeasured.
            inputs = images[batch]
            run.disturb(Moment(min(step, 49), model, optimizer, inputs))
            loss = F.cross_entropy(model(inputs), labels[batch])
            logger.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return logger.alerts


@pytest.mark.usefixtures("busy_machine")
@pytest.mark.parametrize("name", ["exploding", "dead", "diverging"])
def test_repeated_runs_raise_alerts_of_the_same_kinds_and_layers(name: str, tmp_path: Path) -> None:
    alerts = train(name, tmp_path / "first")
    assert alerts
    expected = {(alert.kind, alert.module_name) for alert in alerts if alert.stage == "started"}
    again = train(name, tmp_path / "second")
    assert {(a.kind, a.module_name) for a in again if a.stage == "started"} == expected
