"""Alerts of logs of other programs, from small trainings with and without a fault."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from tests.helpers.shell import call, parsed, records

Logged = list[tuple[int, float, float]]  # step, loss, total gradient norm
AsFile = Callable[[Logged, Path], Path]
POINTS = 300
FAULT = 200  # point at which the fault begins


@cache
def train(fault: str = "", *, seed: int = 0) -> Logged:
    """Train a classifier or, for ``regression``, a regression."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU())
    head = nn.Linear(32, 1)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.02)
    logged: Logged = []
    for step in range(POINTS):
        inputs = torch.randn(32, 8)
        targets = inputs[:, :1] * inputs[:, 1:2] + inputs[:, 2:3] + 0.3 * torch.randn(32, 1)
        if fault == "bad_batch" and step == FAULT:
            targets = targets * 1000
        if fault == "nan" and step == FAULT:
            inputs[3, 3] = math.nan
        if fault == "lr_jump" and step == FAULT:
            optimizer.param_groups[0]["lr"] = 1.0
        if fault == "weights_scaled" and step == FAULT:
            with torch.no_grad():
                for parameter in parameters:
                    parameter.mul_(30)
            optimizer.param_groups[0]["lr"] = 1e-9
        if fault == "lr_grows" and step >= FAULT:
            optimizer.param_groups[0]["lr"] *= 1.15
        loss = nn.functional.mse_loss(head(model(inputs)), targets)
        optimizer.zero_grad()
        loss.backward()
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        if fault == "bad_batch":
            nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
        optimizer.step()
        logged.append((step, loss.item(), norm.item()))
    return logged


def as_board(logged: Logged, path: Path) -> Path:
    with SummaryWriter(path / "board") as writer:
        for step, loss, norm in logged:
            writer.add_scalar("train/loss", loss, step)
            writer.add_scalar("train/grad_norm", norm, step)
            writer.add_scalar("eval/loss", 1e9 * (step % 7), step)
    return path / "board"


def as_state(logged: Logged, path: Path) -> Path:
    history = [{"step": step, "loss": loss, "grad_norm": norm} for step, loss, norm in logged]
    history.insert(50, {"step": logged[50][0], "eval_loss": 1e9})
    history.append({"step": logged[-1][0], "train_loss": 0.5})
    (path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return path / "trainer_state.json"


def as_csv(logged: Logged, path: Path) -> Path:
    with (path / "metrics.csv").open("w") as file:
        rows = csv.writer(file)
        rows.writerow(["epoch", "grad_2.0_norm_total", "step", "train_loss", "val_loss"])
        for step, loss, norm in logged:
            rows.writerow([0, norm, step, "", ""])
            rows.writerow([0, "", step, loss, ""])
            rows.writerow([0, "", step, "", 1e9 * (step % 7)])
    return path / "metrics.csv"


FORMS = [as_board, as_state, as_csv]
# Kind of the first alert, and points until its step at most.
FAULTS = {
    "bad_batch": ("loss_spike", 0),
    "nan": ("nonfinite", 0),
    "lr_jump": ("loss_spike", 3),
    "weights_scaled": ("exploding_gradient", 0),
    "lr_grows": ("exploding_gradient", 40),
}


def judged(
    points: Iterable[tuple[float, ...]], folder: Path, names: str = "step,loss,grad_norm"
) -> list[tuple[str, str, int, float]]:
    """Return kind, stage, step and value of each alert of a plain CSV file."""
    rows = [",".join(map(str, point)) for point in points]
    (folder / "log.csv").write_text("\n".join([names, *rows]))
    found = parsed(call("lint", folder / "log.csv", "--json").stdout)
    return [(alert["kind"], alert["stage"], alert["step"], alert["value"]) for alert in found]


@pytest.mark.parametrize("as_file", FORMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_each_format(fault: str, as_file: AsFile, tmp_path: Path) -> None:
    path = as_file(train(fault), tmp_path)
    first = records("lint", path, status=1)[0]
    kind, late = FAULTS[fault]
    assert first["kind"] == kind
    assert FAULT <= first["step"] <= FAULT + late
    assert first["run"] == str(path)


@pytest.mark.parametrize("as_file", FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_the_same_training_without_a_fault_has_no_alert(
    seed: int, as_file: AsFile, tmp_path: Path
) -> None:
    assert records("lint", as_file(train(seed=seed), tmp_path)) == []


@pytest.mark.parametrize("interval", [10, 500])
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_windows_count_logged_points(fault: str, interval: int, tmp_path: Path) -> None:
    logged = train(fault)
    wide = judged([(step * interval, loss, norm) for step, loss, norm in logged], tmp_path)
    assert wide == [
        (kind, stage, step * interval, value)
        for kind, stage, step, value in judged(logged, tmp_path)
    ]


def test_a_step_that_a_gradient_scaler_skips_is_no_fault(tmp_path: Path) -> None:
    logged = train()[:]
    for point in (0, 1, 120):
        step, loss, _ = logged[point]
        logged[point] = step, loss, math.inf
    assert judged(logged, tmp_path) == []
    without_end = [(step, loss, math.nan if step >= FAULT else n) for step, loss, n in logged]
    [(kind, _, step, _)] = judged(without_end, tmp_path)
    assert (kind, step) == ("nonfinite", FAULT)


def test_a_loss_is_judged_without_a_gradient_norm_and_a_norm_without_a_loss(tmp_path: Path) -> None:
    losses = [(step, loss) for step, loss, _ in train("bad_batch")]
    assert judged(losses, tmp_path, "step,loss")[0][0] == "loss_spike"
    norms = [(step, norm) for step, _, norm in train("weights_scaled")]
    kind, _, step, _ = judged(norms, tmp_path, "step,grad_norm")[0]
    assert (kind, step) == ("exploding_gradient", FAULT)


def test_options_name_the_tags_and_the_severity_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    lines = [f"{step},{loss},{norm}" for step, loss, norm in train("bad_batch")]
    path.write_text("\n".join(["step,objective,size", *lines]))
    for options, said in (([], "--loss"), (["--loss", "objektive"], "objective")):
        done = call("lint", path, *options)
        assert (done.returncode, said in done.stderr) == (2, True)
    named = ["lint", path, "--loss", "objective", "--norm", "size"]
    assert call(*named).returncode == 1
    assert call(*named, "--fail-on", "error").returncode == 0


def test_the_damaged_part_of_an_event_file_is_reported(tmp_path: Path) -> None:
    [path] = as_board(train(), tmp_path).iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    assert "skipped the rest of" in call("lint", path.parent).stderr


TAGS = ",".join(f"tag{number}" for number in range(500))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("state.json", "", "is no TensorBoard directory, trainer_state.json"),
        ("state.json", "{", "is no TensorBoard directory, trainer_state.json"),
        ("state.json", "[]", "has no log_history"),
        ("state.json", '{"log_history": 3}', "has no log_history"),
        ("state.json", '{"log_history": [1]}', "has no log_history"),
        ("README.md", "# Title", "is no TensorBoard directory, trainer_state.json"),
        ("a.csv", "epoch,loss\n1,2", "no CSV file with a column step"),
        ("b.csv", "run,step,module_name,grad_norm\nx,0,fc,1", "and a row for each step"),
        ("c.csv", f"step,{TAGS}\n0{',1' * 500}", "there are"),
    ],
)
def test_what_is_no_log_and_a_tag_that_is_not_in_it_are_named_in_a_line(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    done = call("lint", tmp_path / name, tmp_path / "missing", "--norm", "nope")
    assert done.returncode == 2
    missing, line = done.stderr.splitlines()
    assert "missing" in missing
    assert name in line
    assert said in line
    assert len(line) < 300 + len(str(tmp_path))
