"""Alerts say which samples were in the batch that they blame."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from telemetry import Alert, HookLogger
from telemetry.commands.cli import main
from telemetry.flight import flight_files, read_flight
from telemetry.records.batches import Batch, RecentBatches
from telemetry.run.arguments import batch_ids_of

BATCH = 8
BAD = 157


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
    )


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


def printed(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the output of ``telemetry batches``."""
    capsys.readouterr()
    assert main(["batches", str(log_dir)]) == 0
    return json.loads(capsys.readouterr().out)


OF_BAD = list(range(BAD * BATCH, (BAD + 1) * BATCH))
KINDS = {"NaN": "nonfinite", "unit": "loss_spike", "scale": "exploding_gradient"}


@pytest.mark.parametrize("every_n_steps", [1, 10, 100])
@pytest.mark.parametrize("fault", KINDS)
def test_a_bad_batch_is_found_by_its_ids(
    fault: str, every_n_steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, fault, every_n_steps=every_n_steps)
    found = printed(tmp_path, capsys)
    assert [(f["kind"], f["step"], f["rank"], f["ids"]) for f in found] == [
        (KINDS[fault], BAD, 0, OF_BAD)
    ]
    lines = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert {"step": BAD, "rank": 0, "ids": OF_BAD} in [b for one in lines for b in one["batches"]]
    flight = read_flight(flight_files(tmp_path)[0])
    assert flight["batches"] == (Batch(step=BAD, ids=tuple(OF_BAD)),)
    assert main(["explain", str(tmp_path)]) == 0
    assert str(OF_BAD[0]) in capsys.readouterr().out


@pytest.mark.parametrize("fault", KINDS)
def test_losses_logged_after_the_step_belong_to_the_batch_before(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, fault, every_n_steps=10, logs_after=True)
    assert [found["ids"] for found in printed(tmp_path, capsys)] == [OF_BAD]


def test_ids_of_micro_batches_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, "unit", every_n_steps=10, micro_batches=4)
    assert [found["ids"] for found in printed(tmp_path, capsys)] == [OF_BAD]


def test_the_batch_of_an_exception_is_in_its_flight_file(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        train(tmp_path, "exception")
    (file,) = flight_files(tmp_path)
    assert read_flight(file)["batches"] == (Batch(step=BAD, ids=tuple(OF_BAD)),)


def test_without_ids_the_step_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alerts = train(tmp_path, "NaN", with_ids=False)
    assert [found.batches for found in alerts if found.batches] == [(Batch(step=BAD),)]
    assert [(f["step"], f["ids"]) for f in printed(tmp_path, capsys)] == [(BAD, [])]
    assert read_flight(flight_files(tmp_path)[0])["batches"] == ()


def test_ids_of_the_first_steps_are_apart(tmp_path: Path) -> None:
    net = model()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (net[:2], net[2:])]
    with HookLogger(net, tmp_path) as logger:
        for step in range(3):
            logger.batch([step])  # the first step is still open for further optimizers
            inputs = torch.full((BATCH, 8), math.nan if step == 1 else 1.0)
            net(inputs).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            net.zero_grad()
        (blamed,) = [alert.batches for alert in logger.alerts if alert.kind == "nonfinite"]
    assert blamed == (Batch(step=1, ids=(1,)),)


def test_a_jump_of_the_learning_rate_blames_no_batch(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with HookLogger(net, tmp_path) as logger:
        for step in range(200):
            logger.batch([step])
            optimizer.param_groups[0]["lr"] = 0.01 if step < BAD else 50.0
            inputs = torch.randn(BATCH, 8)
            loss = (net(inputs).squeeze(1) - inputs.sum(1)).square().mean()
            logger.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert [a.kind for a in logger.alerts if a.severity == "error"]
        assert not any(alert.batches for alert in logger.alerts)


def test_ids_go_on_after_a_resume_and_those_of_repeated_steps_are_forgotten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def steps(first: int, last: int, name: str, bad: int = -1) -> None:
        for step in range(first, last):
            logger.batch([f"{name}/{step}"])
            inputs = torch.randn(BATCH, 8) * (math.nan if step == bad else 1)
            net(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with HookLogger(net, tmp_path) as logger:
        steps(0, 20, "first")
        state = logger.state_dict()
        steps(20, 30, "lost")
        logger.load_state_dict(state)
        steps(20, 30, "again", bad=25)
    assert [found["ids"] for found in printed(tmp_path, capsys)] == [["again/25"]]


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
def test_ids_are_strings_and_whole_numbers(ids: Any, expected: tuple[int | str, ...]) -> None:
    assert batch_ids_of(ids) == expected
    assert {*map(type, batch_ids_of(ids))} <= {int, str}


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
def test_other_ids_are_refused(ids: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        batch_ids_of(ids)


def test_wrong_ids_raise_in_the_loop(tmp_path: Path) -> None:
    net = model()
    with HookLogger(net, tmp_path) as logger, pytest.raises(ValueError, match="ids"):
        logger.batch(range(5000))  # type: ignore[arg-type]


def test_a_disabled_closed_or_removed_logger_accepts_ids(tmp_path: Path) -> None:
    HookLogger(model(), tmp_path, enabled=False).batch([1])
    net = model()
    logger = HookLogger(net, tmp_path)
    logger.remove()
    logger.batch([1])
    logger.close()
    logger.batch([1])


def test_memory_is_limited() -> None:
    recent = RecentBatches()
    for step in range(100):
        recent.add([Batch(step=step, ids=tuple(range(4096)))])
    assert [bool(recent.of(step)) for step in (67, 68, 99)] == [False, True, True]
    recent.clear()
    recent.add(Batch(step=step) for step in range(5000))
    assert not recent.of(5000 - 2049)
    assert recent.of(5000 - 2048) == (Batch(step=2952),)


def test_batches_of_several_ranks_are_apart() -> None:
    recent = RecentBatches()
    recent.add([Batch(step=3, ids=(1,)), Batch(step=3, rank=2, ids=("a",))])
    recent.add([Batch(step=3, ids=(2,)), Batch(step=4, ids=(9,))])
    assert recent.of(3) == (Batch(step=3, ids=(1, 2)), Batch(step=3, rank=2, ids=("a",)))


def test_many_ids_are_shortened_in_messages_alone() -> None:
    text = str(Batch(step=5, rank=1, ids=tuple(range(4096))))
    assert "7" in text
    assert "4,088" in text
    assert len(text) < 100
    assert "\x1b" not in str(Batch(step=5, ids=("\x1b[31m" * 40,)))


def test_the_command_loads_no_torch(tmp_path: Path) -> None:
    train(tmp_path, "NaN")
    code = (
        "import sys; from telemetry.commands.cli import main; "
        f"main(['batches', {str(tmp_path)!r}]); sys.exit('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout)[0]["ids"] == OF_BAD
