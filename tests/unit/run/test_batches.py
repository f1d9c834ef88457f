"""Alerts say which samples were in the batch that they blame."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from telemetry import Alert, HookLogger
from tests.helpers.scripted import Scripted, at
from tests.helpers.shell import lines, records
from tests.helpers.tiny_run import TinyRun
from tests.helpers.twins import descend

BATCH = 8
BAD = 157


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
    return nn.Sequential(*layers)


def train(
    log_dir: Path,
    fault: str,
    *,
    micro_batches: int = 1,
    logs_after: bool = False,
    with_ids: bool = True,
    **options: Any,
) -> list[Alert]:
    """Train for 170 steps with one bad batch, 157; the id of a sample is its index."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    samples = torch.randn(BATCH * 170, 8, generator=torch.Generator().manual_seed(0))
    with HookLogger(net, log_dir, **options) as logger:
        for step, indices in enumerate(torch.arange(len(samples)).split(BATCH)):
            total = 0.0
            optimizer.zero_grad()
            for own in indices.chunk(micro_batches):
                if with_ids:
                    logger.batch(own)
                inputs, targets = samples[own].clone(), samples[own].sum(1)
                if step == BAD and fault == "NaN":
                    inputs[0, 2] = math.nan
                elif step == BAD and fault == "unit":
                    targets *= 1000
                elif step == BAD and fault == "scale":
                    inputs *= 1e4
                elif step == BAD and fault == "rate":
                    optimizer.param_groups[0]["lr"] = 50.0
                loss = (net(inputs).squeeze(1) - targets).square().mean()
                loss.backward()
                total += loss.item() / micro_batches
            if not logs_after:
                logger.log(loss=total)
            if fault == "unit":
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            if step == BAD and fault == "exception":
                raise IndexError
            optimizer.step()
            if logs_after:
                logger.log(loss=total)
    return [*logger.alerts]


def blamed_by(log_dir: Path) -> list[dict[str, Any]]:
    """Return the batches that alerts blame, each with its alert's kind."""
    alerts = records("alerts", log_dir, status=1)
    found = [{"kind": a["kind"], **batch} for a in alerts for batch in a["batches"]]
    return [one for place, one in enumerate(found) if one not in found[:place]]


def explained(log_dir: Path) -> list[dict[str, Any]]:
    """Return the batches that are explained of the bad step."""
    [fault] = records("explain", log_dir)
    return list(fault["batches"])


OF_BAD = list(range(BAD * BATCH, (BAD + 1) * BATCH))
BLAMED = {"step": BAD, "rank": 0, "ids": OF_BAD}
KINDS = {"NaN": "nonfinite", "unit": "loss_spike", "scale": "exploding_gradient"}


@pytest.mark.parametrize("every_n_steps", [pytest.param(1, marks=pytest.mark.slow), 100])
@pytest.mark.parametrize("fault", KINDS)
def test_a_bad_batch_is_found_by_its_ids(fault: str, every_n_steps: int, tmp_path: Path) -> None:
    train(tmp_path, fault, every_n_steps=every_n_steps)
    [found] = blamed_by(tmp_path)
    assert found["kind"] == KINDS[fault]
    assert {name: found[name] for name in BLAMED} == BLAMED
    assert explained(tmp_path) == [BLAMED]
    assert str(OF_BAD[0]) in "".join(lines("explain", tmp_path))


@pytest.mark.parametrize(
    ("fault", "options"),
    [*((fault, {"logs_after": True}) for fault in KINDS), ("unit", {"micro_batches": 4})],
)
def test_losses_after_the_step_and_micro_batches_belong_to_their_batch(
    fault: str, options: dict[str, Any], tmp_path: Path
) -> None:
    train(tmp_path, fault, every_n_steps=10, **options)
    assert [found["ids"] for found in blamed_by(tmp_path)] == [OF_BAD]


def test_the_batch_of_an_exception_is_explained(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        train(tmp_path, "exception")
    assert explained(tmp_path) == [BLAMED]


def test_without_ids_the_step_is_known(tmp_path: Path) -> None:
    [found] = [alert.batches for alert in train(tmp_path, "NaN", with_ids=False) if alert.batches]
    assert [(batch.step, batch.ids) for batch in found] == [(BAD, ())]
    assert [(f["step"], f["ids"]) for f in blamed_by(tmp_path)] == [(BAD, [])]
    assert explained(tmp_path) == []


def test_ids_of_the_first_steps_are_apart(tmp_path: Path) -> None:
    net = model()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (net[:2], net[2:])]
    with HookLogger(net, tmp_path) as logger:
        for step in range(3):
            logger.batch([step])  # the first step is still open for further optimizers
            descend(net, torch.full((BATCH, 8), math.nan if step == 1 else 1.0), *optimizers)
    [blamed] = [alert.batches for alert in logger.alerts if alert.kind == "nonfinite"]
    assert [(batch.step, batch.ids) for batch in blamed] == [(1, (1,))]


def test_a_jump_of_the_learning_rate_blames_no_batch(tmp_path: Path) -> None:
    alerts = train(tmp_path, "rate")
    assert [alert.kind for alert in alerts if alert.severity == "error"]
    assert not any(alert.batches for alert in alerts)


def test_ids_go_on_after_a_resume_and_those_of_repeated_steps_are_forgotten(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def steps(first: int, last: int, name: str, bad: int = -1) -> None:
        for step in range(first, last):
            logger.batch([f"{name}/{step}"])
            inputs = torch.randn(BATCH, 8) * (math.nan if step == bad else 1)
            descend(net, inputs, optimizer)

    with HookLogger(net, tmp_path) as logger:
        steps(0, 20, "first")
        state = logger.state_dict()
        steps(20, 30, "lost")
        logger.load_state_dict(state)
        steps(20, 30, "again", bad=25)
    assert [found["ids"] for found in blamed_by(tmp_path)] == [["again/25"]]


# --- ids -----------------------------------------------------------------------------------------


def blamed(log_dir: Path, ids: Mapping[int, Any], *steps: int) -> Alert:
    """Return the alert of the last step that blames batches of these, whose ids are given."""
    detector = Scripted(at(steps[-1], batch_steps=steps), kind="blamed", severity="warning")
    run = TinyRun(log_dir, alerts=[detector])
    with run.logger as logger:
        for step in range(steps[-1] + 1):
            logger.batch(ids.get(step, ()))
            run.train()
    [alert] = logger.alerts
    return alert


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([3, "a"], (3, "a")),
        (("x",), ("x",)),
        (range(3), (0, 1, 2)),
        ([], ()),
        (np.array([[1, 2], [3, 4]]), (1, 2, 3, 4)),
        (np.array(["a", "bc"]), ("a", "bc")),
        ([np.int64(5), np.str_("s"), torch.tensor(7)], (5, "s", 7)),
        (torch.tensor([2**62, -1]), (2**62, -1)),
        ([2**70], (2**70,)),
    ],
)
def test_ids_are_strings_and_whole_numbers(
    tmp_path: Path, ids: Any, expected: tuple[int | str, ...]
) -> None:
    [batch] = blamed(tmp_path, {0: ids}, 0).batches
    assert batch.ids == expected
    assert {*map(type, batch.ids)} <= {int, str}


@pytest.mark.parametrize(
    ("ids", "error", "named"),
    [
        (7, TypeError, r"batch\(ids=7\)"),
        ("abc", TypeError, r"batch\(ids='abc'\)"),
        (iter([1]), TypeError, "list"),
        ([1.5], TypeError, "float"),
        ([True], TypeError, "bool"),
        ([None], TypeError, "None"),
        (torch.tensor([0.5]), TypeError, "float"),
        ([torch.zeros(2, dtype=torch.int64)], TypeError, "Tensor"),
        (range(4097), ValueError, "4,096"),
        (torch.zeros(4097), ValueError, "4,096"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), TypeError, r"\.cpu\(\)"),
    ],
)
def test_other_ids_are_refused(
    tmp_path: Path, ids: Any, error: type[Exception], named: str
) -> None:
    net = model()
    with HookLogger(net, tmp_path) as logger, pytest.raises(error, match=named):
        logger.batch(ids)


def test_the_ids_of_the_latest_32_large_batches_are_kept(tmp_path: Path) -> None:
    ids = {step: range(4096) for step in range(50)}
    alert = blamed(tmp_path, ids, 17, 18, 49)
    assert [len(batch.ids) for batch in alert.batches] == [0, 4096, 4096]


def test_many_ids_are_shortened_in_messages_alone(tmp_path: Path) -> None:
    alert = blamed(tmp_path, {0: range(4096), 1: ["\x1b[31m" * 40]}, 0, 1)
    assert [len(batch.ids) for batch in alert.batches] == [4096, 1]
    first, second = (line for line in alert.message.splitlines() if "Batch" in line)
    assert "7" in first
    assert "4,088" in first
    assert len(first) < 100
    assert "\x1b" not in second
