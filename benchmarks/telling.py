"""Measures how soon a fault is raised, and in the run log that the page reads.

    python benchmarks/telling.py [--quick] [--json FILE]

A loop takes steps of a given length, one of which has a NaN in its loss, or is one at which a rule
alerts although the norm is usual. A second process reads the run all the time.
Times are from before that optimizer step, in seconds, the worst of several runs; that of an
exception includes closing the logger.
"""

from __future__ import annotations

import argparse
import logging
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import describe_machine, write_json
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from telemetry import Alert, HookLogger, StepRecord, TelemetryAlert

FAULTY = 25  # neither measured in full nor the last of eight steps

WATCH = """
import sys, time, telemetry
seen = ()
print("ready", flush=True)
while not seen:
    time.sleep(0.01)
    try:
        seen = telemetry.read(sys.argv[1]).alerts
    except (FileNotFoundError, ValueError):
        pass  # no run yet
print(time.time())
"""


@dataclass(frozen=True, kw_only=True)
class Delays:
    """Delays of an alert in seconds; the step's length and the fault first."""

    step_s: float
    fault: str
    raised_s: float
    read_s: float


def usual(record: StepRecord) -> Iterator[Alert]:
    """Alerts at a step that has nothing unusual."""
    if record.step == FAULTY:
        yield Alert(
            kind="usual", severity="error", step=FAULTY, module_name=None, value=0.0,
            threshold=0.0, summary="planted",
        )  # fmt: skip


def measure(step_s: float, fault: str) -> Delays:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = SGD(model.parameters(), 0.1)
    rules = None if fault == "nan" else [usual]
    began = raised = math.nan
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", WATCH, folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
            assert watcher.stdout is not None
            watcher.stdout.readline()
            try:
                with HookLogger(
                    model,
                    folder,
                    every_n_steps=100,
                    alerts=rules,
                    on_alert="raise",
                    measure="!images",
                ) as logger:
                    for step in range(10 * FAULTY):
                        points = torch.randn(16, 8)
                        loss = F.cross_entropy(model(points), points[:, :3].argmax(1))
                        if step == FAULTY:
                            loss = loss * (math.nan if fault == "nan" else 1.0)
                            began = time.time()
                        optimizer.zero_grad()
                        loss.backward()
                        logger.log(loss=loss)
                        optimizer.step()
                        time.sleep(step_s)
            except TelemetryAlert:
                raised = time.time()
            read = float(watcher.stdout.readline())
    return Delays(step_s=step_s, fault=fault, raised_s=raised - began, read_s=read - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one run of one kind, to try it out")
    parser.add_argument("--json", type=Path, help="write all times here")
    args = parser.parse_args()
    logging.getLogger("telemetry").setLevel(logging.CRITICAL)
    print(describe_machine(torch.device("cpu")))
    print("step   fault   raised   read")
    found = []
    for step_s in (0.02,) if args.quick else (0.02, 0.1, 0.4):
        for fault in ("usual",) if args.quick else ("nan", "usual"):
            runs = [measure(step_s, fault) for _ in range(1 if args.quick else 5)]
            found += runs
            raised = max(run.raised_s for run in runs)
            read = max(run.read_s for run in runs)
            print(f"{step_s:4g}   {fault:5}   {raised:6.2f}   {read:4.2f}")
    if args.json:
        write_json(args.json, torch.device("cpu"), figures=[asdict(run) for run in found])


if __name__ == "__main__":
    main()
