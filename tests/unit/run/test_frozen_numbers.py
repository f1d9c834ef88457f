"""Numbers of a dozen programs in ``telemetry.read`` stay, whatever the files look like.

    python -m tests.unit.run.test_frozen_numbers NAME...

writes the numbers of these programs in ``tests/data/frozen_numbers.json`` again: only where a
number itself was wrong.
"""

from __future__ import annotations

import io
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import tensorboard

import telemetry
from telemetry import HookLogger
from tests.helpers.paths import ROOT
from tests.helpers.scripts import start_script

NUMBERS = ROOT / "tests" / "data" / "frozen_numbers.json"
STEPS = 12
MACHINE = ("time/", "memory/", "data/", "overhead", "interval")
"""Beginnings of the tags of curves that depend on the machine."""

Save = Callable[[int, HookLogger, nn.Module, torch.optim.Optimizer], None]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    points = torch.randn(16, 6, generator=generator)
    return points, points[:, :3].argmax(1)


def train(
    log_dir: Path,
    *,
    model: nn.Module | None = None,
    writer: Any = None,
    first: int = 0,
    last: int = STEPS,
    checkpoint: dict[str, Any] | None = None,
    inputs: Callable[[int, Tensor], Tensor] = lambda step, points: points,
    before: Save = lambda *run: None,
    **options: Any,
) -> None:
    """Train, and call ``before`` with step, logger, model and optimizer before each step."""
    model = model or mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    options = {"every_n_steps": 4, **options}
    with HookLogger(model, writer or log_dir, **options) as logger:
        if checkpoint:
            logger.load_state_dict(checkpoint["logger"])
        for step in range(first, last):
            before(step, logger, model, optimizer)
            points, classes = batch(step)
            points = points.to(next(model.parameters()).dtype)
            loss = F.cross_entropy(model(inputs(step, points)), classes)
            logger.log({"loss": loss, "val/accuracy": 0.5 + 0.01 * step})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            logger.flush()


def given_writer(log_dir: Path) -> None:
    with tensorboard.SummaryWriter(str(log_dir)) as writer:
        train(log_dir, writer=writer)


def directory_used_twice(log_dir: Path) -> None:
    train(log_dir)
    train(log_dir, last=7)


def resumed_twice(log_dir: Path) -> None:
    """Run to step 9, from 6 to 12 again, and from 11 on again, as after lost machines."""
    saved: dict[int, dict[str, Any]] = {}

    def save(step: int, *run: Any) -> None:
        parts = dict(zip(("logger", "model", "optimizer"), run, strict=True))
        if step in (6, 11):
            file = io.BytesIO()
            torch.save({name: part.state_dict() for name, part in parts.items()}, file)
            saved[step] = torch.load(io.BytesIO(file.getvalue()), weights_only=True)

    for first, last in ((0, 9), (6, STEPS), (11, STEPS + 3)):
        train(log_dir, first=first, last=last, checkpoint=saved.get(first), before=save)


def killed(log_dir: Path) -> None:
    """Run in a process that is killed before step 9; each step is flushed."""
    script = """
        import sys
        from pathlib import Path
        from tests.unit.run import test_frozen_numbers
        test_frozen_numbers.train_until_killed(Path(sys.argv[1]))
    """
    with start_script(log_dir.parent, script, log_dir) as process:
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors


def train_until_killed(log_dir: Path) -> None:
    def kill(step: int, *run: Any) -> None:
        if step == 9:
            os.kill(os.getpid(), signal.SIGKILL)

    train(log_dir, before=kill)


def torn(log_dir: Path) -> None:
    """A run of which each file ends with the beginning of a record."""
    train(log_dir)
    for path in log_dir.iterdir():
        if path.is_file() and path.stat().st_size > 100:
            with path.open("ab") as file:
                file.write(path.read_bytes()[:20])


def gan(log_dir: Path) -> None:
    torch.manual_seed(0)
    makes = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
    judges = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    rates = [torch.optim.Adam(part.parameters(), 1e-2) for part in (makes, judges)]
    with (
        HookLogger(makes, log_dir / "G", every_n_steps=4, optimizer=rates[0]) as first,
        HookLogger(judges, log_dir / "D", every_n_steps=4, optimizer=rates[1]) as second,
    ):
        for step in range(STEPS):
            real, _ = batch(step)
            noise = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            on_real = F.softplus(-judges(real)).mean()
            loss_d = on_real + F.softplus(judges(makes(noise).detach())).mean()
            rates[1].zero_grad()
            loss_d.backward()
            rates[1].step()
            loss_g = F.softplus(-judges(makes(noise))).mean()
            rates[0].zero_grad()
            loss_g.backward()
            rates[0].step()
            first.log(loss=loss_g)
            second.log(loss=loss_d)
            first.flush()
            second.flush()


def convolutions(log_dir: Path) -> None:
    """A run without biases whose gradients are zero but for rounding, which depends on the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4),
        nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip
    train(log_dir, model=model)


def attention(log_dir: Path) -> None:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Linear(1, 8), nn.Linear(8, 3)
            # The gradient of a bias of the keys is zero but for rounding.
            self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)

        def forward(self, points: Tensor) -> Tensor:
            tokens = self.embed(points[..., None])
            return self.out(self.attention(tokens, tokens, tokens)[0].mean(1))

    train(log_dir, model=Net())


def frozen_part(log_dir: Path) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    train(log_dir, model=model)


def explosion(log_dir: Path) -> None:
    model = mlp().double()  # in float32, differences between processors would grow

    def disturb(step: int, *run: Any) -> None:
        if step == 40:
            model[2].weight.data.mul_(1e5)

    train(log_dir, model=model, last=50, before=disturb)


def died(log_dir: Path) -> None:
    """A run that an exception of its own ends."""

    def fail(step: int, *run: Any) -> None:
        if step == 9:
            raise ZeroDivisionError

    with suppress(ZeroDivisionError):
        train(log_dir, before=fail)


PROGRAMS: dict[str, Callable[[Path], None]] = {
    "plain": train,
    "every_step": partial(train, every_n_steps=1),
    "nan_batch": partial(train, inputs=lambda step, x: x * (math.nan if step == 6 else 1)),
}
for program in (
    given_writer, directory_used_twice, resumed_twice, killed, torn, gan, convolutions, attention,
    frozen_part, explosion, died,
):  # fmt: skip
    PROGRAMS[program.__name__] = program


def numbers(log_dir: Path) -> dict[str, Any]:
    """Numbers of all runs below a directory, as ``telemetry.read`` gives them, by run.

    Curves and statistics are by name (and module): ``[steps, values]``; histograms by tag:
    ``[steps, counts]``.
    """
    folders = [log_dir] if not (log_dir / "G").exists() else sorted(log_dir.iterdir())
    return {str(folder.relative_to(log_dir)): dict(_of_run(folder)) for folder in folders}


def _of_run(folder: Path) -> Iterator[tuple[str, Any]]:
    run = telemetry.read(folder)
    of_tags = run.scalars.groupby("tag", observed=True)
    curves = {tag: _series(rows) for tag, rows in of_tags if not tag.startswith(MACHINE)}
    yield "curves", curves
    of_layers = run.layers.groupby(["statistic", "module_name"], observed=True)
    yield "layers", {" ".join(names): _series(rows) for names, rows in of_layers}
    histograms = {tag: run.histogram(tag) for tag in run.histogram_tags}
    counts = {
        tag: [[*found], [float(table[:, 2].sum()) for table in found.values()]]
        for tag, found in histograms.items()
        if found
    }
    yield "histograms", counts
    yield "alerts", [[a.kind, a.step, a.module_name, a.severity, a.stage] for a in run.alerts]
    yield "modules", run.modules.module_name.tolist()


def _series(rows: Any) -> list[list[float]]:
    rows = rows.sort_values("step")
    return [rows.step.tolist(), [float(f"{value:.6g}") for value in rows.value]]


def differences(frozen: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield each frozen number that differs by more than another processor's rounding."""
    if isinstance(frozen, dict) and isinstance(now, dict):
        for key in frozen:
            yield from differences(frozen.get(key), now.get(key), f"{path}/{key}")
    elif isinstance(frozen, list) and isinstance(now, list) and len(frozen) == len(now):
        for index, (before, after) in enumerate(zip(frozen, now, strict=True)):
            yield from differences(before, after, f"{path}/{index}")
    elif isinstance(frozen, float) and isinstance(now, float):
        if not np.isclose(frozen, now, rtol=1e-4, atol=1e-7, equal_nan=True):
            yield f"{path}: {frozen} is now {now}"
    elif frozen != now:
        yield f"{path}: {frozen} is now {now}"


@pytest.mark.parametrize(
    "name", [*sorted(PROGRAMS.keys() - {"killed"}), pytest.param("killed", marks=pytest.mark.slow)]
)
def test_numbers_of_a_run_stay(name: str, tmp_path: Path) -> None:
    frozen = json.loads(NUMBERS.read_text(encoding="utf-8"))
    assert frozen.keys() == PROGRAMS.keys()
    PROGRAMS[name](tmp_path)
    assert list(differences(frozen[name], numbers(tmp_path))) == []


def main() -> None:
    """Write the numbers of the named programs."""
    torch.set_num_threads(1)
    found = json.loads(NUMBERS.read_text(encoding="utf-8"))
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            PROGRAMS[name](Path(folder))
            found[name] = numbers(Path(folder))
    NUMBERS.parent.mkdir(exist_ok=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    NUMBERS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
