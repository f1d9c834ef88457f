"""Runs of every kind that this version writes, which later versions have to open.

``earlier_runs.py FOLDER`` writes them and what is read from them: ``tests/fixtures/0.1.0``, by
version 0.1.0. A version that writes something in another form adds a folder of its own and leaves
the others. ``earlier_runs.py LOG_DIR NAME`` resumes one of them, from its checkpoint. See
test_earlier_versions.py.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from board import open_slow
from client import Client
from earlier_figures import as_json, differences, figures
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from telemetry import Alert, HookLogger, Rule, StepRecord
from telemetry.alerts import default_rules
from telemetry.commands.cli import main as telemetry

STEPS = 96
SAVED = 55
"""Number of optimizer steps before the checkpoint; the run goes on from it once already."""
MORE = 20
RUNS = {"alone": 1, "merged": 2}
"""Of how many ranks each is."""


class Counter(Rule):
    """A rule with a state of its own."""

    count = 0

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self.count += 1
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


class Training:
    """A small network, in which a layer dies, the learning rate is zero, and a batch is NaN."""

    def __init__(self, rank: int, size: int) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.net = nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 3),
        )  # fmt: skip
        self.model = self.net if size == 1 else DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.counter = Counter()

    def logger(self, log_dir: Path) -> HookLogger:
        return HookLogger(
            self.model, log_dir, every_n_steps=15, alerts=[*default_rules(), self.counter],
            max_bytes_per_step=6000,
        )  # fmt: skip

    def go_on(self, logger: HookLogger, end: int) -> None:
        for step in range(logger.current_step, end):
            self._disturb(step)
            batch = torch.Generator().manual_seed(100 * step + self.rank)
            images = torch.rand(64, 1, 6, 6, generator=batch)
            labels = images.mean((1, 2, 3)).sub(0.45).mul(30).clamp(0, 2.9).long()
            if step == 90 and self.rank == 0:
                images[0] = math.nan
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(images), labels)
            logger.log(loss=loss, accuracy=step / STEPS)
            loss.backward()
            self.optimizer.step()
            if step == 20:
                with logger.phase("validation"), torch.no_grad():
                    self.net(images)

    def _disturb(self, step: int) -> None:
        if step == 20:
            nn.init.constant_(self.net[3].bias, -50)
        if step == 45:
            nn.init.constant_(self.net[3].bias, 0.1)
        self.optimizer.param_groups[0]["lr"] = 0.0 if 50 <= step < 73 else 0.05

    def checkpoint(self, logger: HookLogger) -> dict[str, Any]:
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "logger": logger.state_dict(),
        }

    def resume(self, logger: HookLogger, checkpoint: Path) -> None:
        saved = torch.load(checkpoint, weights_only=True)
        self.net.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        logger.load_state_dict(saved["logger"])


def write(rank: int, size: int, log_dir: Path) -> None:
    """A run that is interrupted after its checkpoint, and a second part of it."""
    checkpoint = log_dir / f"checkpoint-{rank}.pt"
    first = Training(rank, size)
    with first.logger(log_dir) as logger:
        logger.hparams({"lr": 0.05, "optimizer": "SGD"})
        first.go_on(logger, SAVED)
        torch.save(first.checkpoint(logger), checkpoint)
        first.go_on(logger, SAVED + 2)
    second = Training(rank, size)
    with second.logger(log_dir) as logger:
        second.resume(logger, checkpoint)
        second.go_on(logger, STEPS)


def resume(rank: int, size: int, log_dir: Path) -> None:
    """Goes on for some steps; prints what the state held."""
    training = Training(rank, size)
    with training.logger(log_dir) as logger:
        training.resume(logger, log_dir / f"checkpoint-{rank}.pt")
        if rank == 0:
            print(json.dumps([logger.current_step, training.counter.count]))
        training.go_on(logger, SAVED + MORE)


def rank_of(rank: int, work: str, size: int, log_dir: str) -> None:
    torch.set_num_threads(1)
    if size > 1:
        method = f"file://{log_dir}/rendezvous"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    {"write": write, "resume": resume}[work](rank, size, Path(log_dir))
    if size > 1:
        dist.destroy_process_group()


def on_ranks(work: str, log_dir: Path, size: int) -> None:
    if size == 1:
        rank_of(0, work, size, str(log_dir))
    else:
        multiprocessing.spawn(rank_of, args=(work, size, str(log_dir)), nprocs=size)
        (log_dir / "rendezvous").unlink(missing_ok=True)


def write_all(folder: Path) -> None:
    """All that is kept, in files whose names are not those of this machine."""
    for name, size in RUNS.items():
        (folder / name).mkdir(parents=True)
        on_ranks("write", folder / name, size)
        for number, file in enumerate(sorted((folder / name).glob("events*"))):
            file.rename(file.with_name(f"events.out.tfevents.17000000{number:02}.host.1.{number}"))
    provider = open_slow(folder)
    expected = {name: figures(folder / name, Client(provider)) for name in RUNS}
    expected["diff"] = {"differences": differences(folder)}
    (folder / "expected.json").write_text(as_json(expected), encoding="utf-8")
    report = folder / "alone.html"
    telemetry(["report", str(folder / "alone"), "-o", str(report)])
    # Its script and style are those of the page, and four fifths of the file.
    text = report.read_text(encoding="utf-8")
    text = re.sub('(?s)<style>.*?</style>|javascript;base64,[^"]*', "", text)
    report.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        write_all(Path(sys.argv[1]).resolve())
    else:
        on_ranks("resume", Path(sys.argv[1]), RUNS[sys.argv[2]])
