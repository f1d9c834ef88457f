"""Records the input of the rules in real runs, and replays it to them in seconds.

    python benchmarks/replay.py record --out DIR [--only GLOB] [--seed N]
    python benchmarks/replay.py replay DIR [--only GLOB] [--every 1 10 100] [--norms K]
        [--load SEED] [--times] [--jobs N] [--save FILE] [--compare FILE] [--against FILE]
        [--freeze FILE]

``record`` trains all runs of faultbench, its released runs, ``realruns`` and ``benchmarks/runs``
(only the last where ``../shared`` is missing) once, and keeps each step in full, in one file for
each logger of a run; runs with a file are skipped. ``replay`` gives each step to the default rules,
in full or with its norms alone, as a logger with that ``every_n_steps`` does: where it is due, and
where rules request it as in :class:`telemetry.capture.Schedule`. It prints how many full steps
healthy runs had. With ``--norms K``, norms fit into the time of one step in K, as in a fast loop;
with ``--load SEED``, the load of the machine varies at random.
``--save`` writes all alerts; ``--compare`` lists those that differ from such a file, field by
field, and fails then. ``--freeze`` writes kind, step, module, severity and stage of each alert;
``--against`` compares with such a file and fails if a fault is no longer found, a healthy run has a
new warning, or the 90th percentile of the latency has grown: ``benchmarks/verdicts.json`` is the
file to which each change of a rule is held.

The files hold public attributes of ``StepRecord`` as plain arrays and JSON: where records are built
in another way, :class:`Recorded` has to follow. Not kept are pictures, states of generators,
histograms of parameters and their gradients, and facts of several ranks, which no run has.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, partial
from itertools import compress
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import faultbench
import numpy as np
import realruns
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from telemetry import Alert, Rule, StepRecord
from telemetry.alerts import default_rules
from telemetry.alerts.configuration import DETECTORS
from telemetry.capture import Schedule
from telemetry.capture.schedule import Account, Plan
from telemetry.failures import RaisingFailures
from telemetry.pipeline.judge import Judge
from telemetry.plain_text import json_plain
from telemetry.records import Layout, Module, Output, Parameter, TensorRecord
from telemetry.records.loss import LossChoice
from telemetry.records.moments import COUNTS, EXTREMES, POWER_SUMS
from telemetry.records.sketch import Sketch
from telemetry.records.tensor import Tensors
from telemetry.testing import capture_run

FACTS = ("step", "wall_time", "scalars", "eval_mode", "loss_scale", "skipped_steps", "skipped")
TUPLES = ("learning_rates", "fingerprints", "nan_buffers", "nonfinite_parameters")
BROKEN = TUPLES[2:]  # also looked for where a gradient is not finite
FULL_FACTS = ("examples", "total_grad_norm_before_clipping", "clipped_fraction")
NORMS = ("grad_norms", "grad_present", "grad_finite")
MARKS = ("trainable", "reached", "held", "not_zeroed", "groups")
TENSORS = ("inputs", "outputs", "output_grads", "grads", "weights", "second_moments")
WITH_HISTOGRAMS = 3  # the first of these
MOMENTS = (*COUNTS, *EXTREMES, *POWER_SUMS)

# --- recording -------------------------------------------------------------------------------


class Recorder(Rule):
    """Rule that finds nothing and keeps its input.

    Attributes:
        kept: Where the run keeps its records: they are taken from there, to spare memory.
    """

    def __init__(self) -> None:
        self.kept: list[StepRecord] = []
        self._events: list[Any] = []  # of a loss its step and value, of a step its facts
        self._layouts: list[Layout] = []
        self._names: dict[str, int] = {}
        self._columns: dict[str, list[Any]] = defaultdict(list)

    def on_loss(self, step: int, loss: float) -> Sequence[Alert]:
        self._events.append([step, loss])
        return ()

    def __call__(self, record: StepRecord) -> Sequence[Alert]:
        if not record.full or record.ranks is not None:
            raise ValueError(f"step {record.step} is not one of one process, measured in full")
        self.kept.clear()
        if not self._layouts or self._layouts[-1] is not record.layout:
            self._layouts.append(record.layout)
        facts = {name: getattr(record, name) for name in (*FACTS, *FULL_FACTS, *TUPLES)}
        for name in (*NORMS, *MARKS):
            self._columns[name].append(getattr(record, name))
        names, ratios = [p.name for p in record.layout.parameters], record.update_ratios
        self._columns["has_ratio"].append([name in ratios for name in names])
        self._columns["ratios"].append([ratios.get(name, 0.0) for name in names])
        tensors = [(k, *item) for k, n in enumerate(TENSORS) for item in getattr(record, n).items()]
        for kind, key, tensor in tensors:
            module, place = key if isinstance(key, Output) else (key, 0)
            self._add(kind, module, place, tensor)
        facts |= {"layout": len(self._layouts) - 1, "tensors": len(tensors)}
        self._events.append(facts)
        return ()

    def _add(self, kind: int, module: str, place: int, tensor: TensorRecord) -> None:
        add, sketch, units = self._columns, tensor.sketch, tensor.unit_min
        name = self._names.setdefault(module, len(self._names))
        buckets = sketch.buckets if kind < WITH_HISTOGRAMS else sketch.buckets[:0]
        size = -1 if units is None else units.size
        add["tensors"].append((kind, name, place, tensor.calls, size, buckets.size))
        add["moments"].append([getattr(sketch, moment) for moment in MOMENTS])
        if units is not None:
            add["unit_min"].append(units)
            add["unit_max"].append(tensor.unit_max)
        add["buckets"].append(buckets)
        add["counts"].append(sketch.counts[: buckets.size])

    def save(self, path: Path) -> None:
        """Write all of it into a new file."""
        layouts = [
            {
                "modules": [(m.name, m.type_name) for m in layout.modules],
                "parameters": [(p.name, p.module_name, p.shape) for p in layout.parameters],
            }
            for layout in self._layouts
        ]
        text = {"layouts": layouts, "names": list(self._names), "events": self._events}
        rows, moments = (self._columns.pop(name, []) for name in ("tensors", "moments"))
        arrays: dict[str, Any] = {
            "text": np.frombuffer(json.dumps(text).encode(), np.uint8),
            # With each column in one piece they take less when compressed.
            "tensors": np.array(rows, np.int32).reshape(-1, 6).T,
            "moments": np.array(moments).reshape(-1, len(MOMENTS)).T,
        }
        arrays |= {name: np.concatenate(parts) for name, parts in self._columns.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".part").open("wb") as file:
            np.savez_compressed(file, **arrays)
        path.with_suffix(".part").rename(path)


class Log:
    """Given to a run, and to faultbench as its adapter: records instead of logging."""

    def __init__(self, seed: int, stack: ExitStack) -> None:
        self.every, self.seed = 1, seed
        self.losses: list[float] = []
        self.recorders: list[Recorder] = []
        self._stack = stack

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None, *info: object) -> Any:
        recorder = Recorder()
        self.recorders.append(recorder)
        # faultbench says more of a case, and its loggers are not given the optimizer.
        of = None if info else optimizer
        captured = capture_run(model, every_n_steps=1, rules=[recorder], optimizer=of)
        self._run = self._stack.enter_context(captured)
        recorder.kept = self._run.records
        return self._run

    def note(self, **figures: float) -> None:
        """Equivalent of :meth:`realruns.Log.note`."""

    def after_backward(self, step: int, loss: float) -> None:
        self._run.log(loss=loss)

    def after_step(self, step: int, loss: float) -> None:
        """Everything has happened."""


def all_runs(seed: int) -> dict[str, Callable[[Any], object]]:
    """Return the training of each run by bench and name; print the missing benches."""
    found: dict[str, Callable[[Any], object]] = {}
    for bench in ("runs", "realruns"):
        runs = realruns.load(bench)[0]
        found |= {f"{bench}.{name}": train for name, train in runs.items()}
        if not runs:
            print(f"without {bench}: {realruns.SHARED / bench} is not there")
    library = faultbench.load_faultbench()
    if library is None:
        print(f"without faultbench: {faultbench.HOME} is not there")
        return found
    for bench, home in faultbench.HOMES.items():
        for case in library.load_cases(str(home)):
            found[f"{bench}.{case.name}"] = partial(library.train, case, seed=seed)
    return found


def record(out: Path, only: str, seed: int) -> int:
    """Record the missing runs; return the number of failures."""
    failed = 0
    for name, train in all_runs(seed).items():
        if not fnmatch(name, only) or (out / f"{name}.0.npz").exists():
            continue
        began = time.monotonic()
        torch.manual_seed(seed)
        try:
            with ExitStack() as stack:
                train(log := Log(seed, stack))
            for index, recorder in reversed([*enumerate(log.recorders)]):
                recorder.save(out / f"{name}.{index}.npz")
        except Exception:  # record the other runs anyway
            failed += 1
            print(f"{name} FAILED\n{traceback.format_exc()}", flush=True)
        else:
            print(f"{name:<50} {time.monotonic() - began:6.1f} s", flush=True)
    return failed


# --- reading ---------------------------------------------------------------------------------


class Recorded:
    """A file of :class:`Recorder`.

    Attributes:
        events: In their order; of a loss ``[step, value]``, of a step a dict.
    """

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self._arrays: dict[str, NDArray[Any]] = {name: file[name] for name in file.files}
        text = json.loads(self._arrays["text"].tobytes())
        self.events: list[Any] = text["events"]
        self._names: list[str] = text["names"]
        self._layouts = [
            Layout(
                modules=tuple(Module(name=n, type_name=t) for n, t in layout["modules"]),
                parameters=tuple(
                    Parameter(name=n, module_name=m, shape=tuple(shape))
                    for n, m, shape in layout["parameters"]
                ),
            )
            for layout in text["layouts"]
        ]
        units, buckets = self._arrays["tensors"][4:].clip(min=0)
        self._first_unit, self._first_bucket = units.cumsum() - units, buckets.cumsum() - buckets
        parameter = tensor = 0
        for event in self.events:
            if isinstance(event, dict):
                event["layout"] = self._layouts[event["layout"]]
                count = len(event["layout"].parameters)
                event["parameters"] = slice(parameter, parameter := parameter + count)
                event["tensors"] = range(tensor, tensor := tensor + event["tensors"])

    def record(self, step: Mapping[str, Any], *, full: bool, **known: Any) -> StepRecord:
        """Input of the rules at a full step or at a light one, with other fields."""
        fields: dict[str, Any] = {n: self._arrays[n][step["parameters"]] for n in NORMS}
        fields |= {name: step[name] for name in (*FACTS, "layout")} | {"full": full}
        finite = fields["grad_finite"].all()
        some = TUPLES if full else ("learning_rates", *(() if finite else BROKEN))
        fields |= {name: tuple(step[name]) for name in some}
        return StepRecord(**fields, **(self._detail(step) if full else {}), **known)

    def _detail(self, step: Mapping[str, Any]) -> dict[str, Any]:
        arrays, some = self._arrays, step["parameters"]
        detail: dict[str, Any] = {name: arrays[name][some] for name in MARKS if name in arrays}
        names = [parameter.name for parameter in step["layout"].parameters]
        ratios = zip(names, arrays["ratios"][some].tolist(), strict=True)
        detail |= {name: step[name] for name in FULL_FACTS} | {field: {} for field in TENSORS}
        before = detail.pop("total_grad_norm_before_clipping")  # the norms have this total
        detail["grad_norms_before_clipping"] = np.array([before][: before is not None], np.float64)
        detail["update_ratios"] = dict(compress(ratios, arrays["has_ratio"][some]))
        for row in step["tensors"]:
            kind, name, place = arrays["tensors"][:3, row].tolist()
            module, field = self._names[name], TENSORS[kind]
            key = Output(module, place) if field.startswith("output") else module
            detail[field][key] = self._tensor(row)
        return detail | {field: Tensors.of(detail[field]) for field in TENSORS}

    def _tensor(self, row: int) -> TensorRecord:
        arrays, (calls, size, filled) = self._arrays, self._arrays["tensors"][3:, row].tolist()
        values: dict[str, Any] = dict(zip(MOMENTS, arrays["moments"][:, row].tolist(), strict=True))
        values |= {name: int(values[name]) for name in COUNTS}
        units = slice(first := int(self._first_unit[row]), first + size)
        some = slice(first := int(self._first_bucket[row]), first + filled)
        counts = arrays["counts"][some].astype(np.float64)
        return TensorRecord(
            sketch=Sketch(**values, buckets=arrays["buckets"][some], counts=counts),
            calls=calls,
            unit_min=arrays["unit_min"][units] if size >= 0 else None,
            unit_max=arrays["unit_max"][units] if size >= 0 else None,
        )


# --- replaying -------------------------------------------------------------------------------

LOSS = "loss"  # its tag

Fields = dict[str, Any]
"""Of an alert."""


class Simulated(Account):
    """Account that reads no clock."""

    is_covered = True  # whether the step has norms

    def __init__(self) -> None:
        super().__init__(1.0, pays_full=False)

    def covers_norms(self) -> bool:
        return self.is_covered


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Machine of a replayed run: how many steps have norms, and when the rules judge them.

    Attributes:
        norms_every: One step in so many can have norms.
        seed: None for an idle machine, whose rules judge a step before the second one after it.
            Otherwise its load varies: gaps between norms have random lengths with this mean, and
            the rules lag up to :data:`MAX_LAG` steps behind.
    """

    norms_every: int = 1
    seed: int | None = None


IDLE = Machine()
MAX_LAG = 20  # steps


class Every(Schedule):
    """Schedule of a run on a simulated machine."""

    account: Simulated

    def __init__(self, every_n_steps: int, machine: Machine) -> None:
        takes_all = machine.norms_every == 1
        super().__init__(every_n_steps, math.inf if takes_all else None)
        self._machine, self._random = machine, Random(machine.seed)
        self.loss_tag, self.account = LOSS, Simulated()

    def plan(self, step: int) -> Plan:
        every, is_idle = self._machine.norms_every, self._machine.seed is None
        self.account.is_covered = (
            step % every == 0 if is_idle else self._random.random() < 1 / every
        )
        return super().plan(step)


class Replay:
    """Default rules, and others, with a run replayed as by a logger with this ``every_n_steps``.

    Attributes:
        alerts: What they found.
        due: How many full steps were due; the others were requested.
        times_s: Durations of the rules' evaluations: of light steps, of full steps.
    """

    def __init__(
        self, every_n_steps: int, machine: Machine = IDLE, others: Iterable[Rule] = ()
    ) -> None:
        self.alerts: list[Fields] = []
        self.due = 0
        self._every_n_steps = every_n_steps
        self.times_s: tuple[list[float], list[float]] = ([], [])
        self._schedule = Every(every_n_steps, machine)
        self._between: list[tuple[int, float]] = []  # losses of skipped steps
        self._judge = Judge([*default_rules(), *others], RaisingFailures())
        self._queue: deque[tuple[int, Callable[[], None]]] = (
            deque()
        )  # what the rules judge, by step
        self._is_idle, self._random, self._lag = machine.seed is None, Random(machine.seed), 0
        self._loss, self._loss_s = LossChoice(LOSS), 0.0

    def show(self, file: Recorded, event: Any) -> None:
        """The next step or loss."""
        if isinstance(event, list):
            step, loss = event
            self._schedule.logged(step, {LOSS: loss})
            self._loss.add(step, (LOSS,))
            self._queue.append((step, partial(self._judge_loss, step, loss)))
            return
        step = event["step"]
        self.due += step % self._every_n_steps == 0
        plan = self._schedule.plan(step)
        known = {"loss_delay": self._loss.delay, "losses_between": tuple(self._between)}
        record = file.record(event, full=plan == "full", **known)
        self._loss.step_ended(step)
        if plan == "skip":
            self._between += [] if record.loss is None else [(step, record.loss)]
        else:
            self._queue.append((step, partial(self._judge_step, record)))
            self._between = []
        self._schedule.plan(step + 1)  # before the rules judge this step
        if not self._is_idle:
            self._lag = min(max(self._lag + self._random.randint(-5, 5), 0), MAX_LAG)
        self.judge_up_to(step - self._lag)

    def judge_up_to(self, step: float) -> None:
        """Let the rules judge the steps up to this one, and their losses."""
        while self._queue and self._queue[0][0] <= step:
            self._queue.popleft()[1]()

    def _judge_loss(self, step: int, loss: float) -> None:
        self._loss_s += self._took(lambda: self._judge.judge_loss(step, loss))

    def _judge_step(self, record: StepRecord) -> None:
        took_s = self._took(lambda: self._judge.judge(record))
        self.times_s[record.full].append(self._loss_s + took_s)
        self._loss_s = 0.0
        if count := self._judge.request(self._schedule, record):
            self._schedule.request_full(record.step + 2, count)

    def _took(self, judge: Callable[[], list[Alert]]) -> float:
        began = time.perf_counter()
        found = judge()
        took_s = time.perf_counter() - began
        self.alerts += [json.loads(json.dumps(json_plain(alert))) for alert in found]
        return took_s


Row = tuple[str, list[Fields], tuple[list[float], list[float]], int]
"""The name of a replay, its alerts, the times, and how many full steps were due."""


def replayed(path: Path, intervals: Sequence[int], machine: Machine = IDLE) -> list[Row]:
    """A run with each of the intervals."""
    torch.set_num_threads(1)
    file, replays = Recorded(path), {n: Replay(n, machine) for n in intervals}
    for replay in replays.values():
        try:
            for event in file.events:
                replay.show(file, event)
            replay.judge_up_to(math.inf)
        except Exception as error:  # of a rule: a difference like others
            traceback.print_exc()
            replay.alerts.append({"kind": "raised", "message": repr(error)})
    return [(f"{path.stem} every {n}", r.alerts, r.times_s, r.due) for n, r in replays.items()]


def differences(before: Mapping[str, list[Fields]], now: Mapping[str, list[Fields]]) -> list[str]:
    """Each alert that appeared, vanished or changed, in a few lines; of the runs in ``now``."""
    lines: list[str] = []
    for name, found in now.items():
        if name not in before:
            lines.append(f"{name}: is not among the verdicts")
            continue
        new, old = list(found), list(before[name])
        for alert in found:
            if alert in old:
                old.remove(alert)
                new.remove(alert)
        for alert in new:
            alike = [a for a in old if all(a.get(f) == alert.get(f) for f in ("kind", "stage"))]
            if not alike:
                lines.append(f"{name}: appeared: {json.dumps(alert)}")
                continue
            old.remove(alike[0])
            lines.append(f"{name}: changed: {alert['kind']} {alert.get('stage')}")
            fields = [field for field in alert if alert[field] != alike[0].get(field)]
            lines += [f"    {f}: {alike[0].get(f)!r} -> {alert[f]!r}" for f in fields]
        lines += [f"{name}: vanished: {json.dumps(alert)}" for alert in old]
    return lines


@cache
def onsets() -> dict[str, int | None]:
    """First step at which the fault of a run can be seen, by bench and name; None if healthy."""
    known: dict[str, int | None] = {}
    for bench in ("runs", "realruns"):
        for name, label in realruns.load(bench)[1].items():
            if label.want in "HF":  # silence and an alert are both right for the others
                known[f"{bench}.{name}"] = None if label.want == "H" else label.onset
    library = faultbench.load_faultbench()
    for bench, home in faultbench.HOMES.items():
        for case in library.load_cases(str(home)) if library else ():
            known[f"{bench}.{case.name}"] = None if case.label == "healthy" else case.onset
    return known


def show_full_steps(rows: Sequence[Row], intervals: Sequence[int]) -> None:
    """Number of full steps of the healthy runs in addition to the scheduled ones."""
    healthy = {name for name, onset in onsets().items() if onset is None}
    for n in intervals:
        counts = [
            (due, len(times_s[1]))
            for name, _, times_s, due in rows
            if name.endswith(f" every {n}") and name.rsplit(".", 1)[0] in healthy and due
        ]
        if counts:
            due, full = map(sum, zip(*counts, strict=True))
            doubled = sum(full > 2 * due for due, full in counts)
            print(
                f"every {n}: {len(counts)} healthy runs, {due} full steps due, {full} measured "
                f"(x{full / due:.2f}), more than twice as many in {doubled} runs"
            )


BRIEF = ("kind", "step", "module_name", "severity", "stage")
Verdict = list[Any]
"""The fields in ``BRIEF`` of an alert."""


def brief(verdicts: Mapping[str, Sequence[Fields]]) -> dict[str, list[Verdict]]:
    """The verdicts without their texts."""
    return {n: [[alert.get(f) for f in BRIEF] for alert in some] for n, some in verdicts.items()}


def latencies(
    verdicts: Mapping[str, Sequence[Verdict]],
) -> dict[str, tuple[int, int] | None]:
    """Steps to the first warning or error of each fault; None without one.

    Counted from its onset, and from the step at which the records show it: see :func:`shown`.
    """
    found: dict[str, tuple[int, int] | None] = {}
    for name, alerts in verdicts.items():
        if (onset := onsets().get(run_of(name))) is None:
            continue
        loud = [
            (step, kind)
            for kind, step, _, severity, stage in alerts
            if stage != "resolved" and severity != "note" and step >= onset
        ]
        step, kind = min(loud, default=(0, ""))
        since = shown(kind, onset, int(name.rpartition(" ")[2])) if kind else 0
        found[name] = (step - onset, max(step - since, 0)) if kind else None
    return found


def shown(kind: str, onset: int, every_n_steps: int) -> int:
    """First step at which records show a fault of this kind.

    Kinds that only full steps show are in the first scheduled one from the onset on. Kinds that a
    number of steps defines, such as no gradient in 90 steps, are there after so many.
    """
    detector = DETECTORS[kind]()
    first = -(-onset // every_n_steps) * every_n_steps if detector.on == "full" else onset
    return first + max(int(getattr(detector, "steps", 1)) - 1, 0)


def run_of(name: str) -> str:
    """Bench and name of the run of a replay such as ``runs.text_ok.0 every 10``."""
    return name.partition(" ")[0].rpartition(".")[0]


def judged(before: Mapping[str, list[Verdict]], now: Mapping[str, list[Verdict]]) -> list[str]:
    """Each difference that no change of a rule may make; prints the others, too."""
    common = sorted(before.keys() & now.keys())
    faults: list[str] = []
    for name in common:
        for sign, some, others in (("-", before[name], now[name]), ("+", now[name], before[name])):
            for verdict in some:
                if verdict not in others:
                    print(f"{sign} {name}: {verdict}")
        loud = [
            {verdict[0] for verdict in some[name] if verdict[3] != "note"} for some in (before, now)
        ]
        if onsets().get(run_of(name), 0) is None and loud[1] - loud[0]:
            faults.append(f"{name} is healthy and has a new {', '.join(sorted(loud[1] - loud[0]))}")
    old, new = (latencies({name: some[name] for name in common}) for some in (before, now))
    faults += [f"{n} is no longer found" for n in old if old[n] is not None and new[n] is None]
    pairs = [(old[name], new[name]) for name in old]
    both = [(before, after) for before, after in pairs if before and after]
    if both:
        # [median and 90th percentile, before and now, from the onset and from what is shown]
        figures = np.percentile(both, (50, 90), axis=0).tolist()
        for n, since in enumerate(("onset", "step that shows it")):
            was, is_now = ([of[when][n] for of in figures] for when in (0, 1))
            print(f"latency from the {since}, median and 90th percentile: {was} -> {is_now}")
            faults += ["the 90th percentile of the latency has grown"] * (is_now[1] > was[1])
    print(f"{len(common)} of {len(now)} replays compared with {len(before)}")
    return faults


def show_times(name: str, times_s: Sequence[Sequence[float]]) -> None:
    """Medians of what judging a step takes."""
    words = [f"{1e6 * median(some):8.1f}" if some else f"{'-':>8}" for some in times_s]
    print(f"{name:<60} light {words[0]} us  full {words[1]} us")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording, replaying = commands.add_parser("record"), commands.add_parser("replay")
    for command in (recording, replaying):
        command.add_argument("--only", default="*", help="bench and name, as 'realruns.gpt*'")
    recording.add_argument("--out", type=Path, required=True)
    recording.add_argument("--seed", type=int, default=0)
    replaying.add_argument("folder", type=Path)
    replaying.add_argument("--every", type=int, nargs="+", default=[1, 10, 100])
    replaying.add_argument("--norms", type=int, default=1, help="one step in so many has norms")
    replaying.add_argument("--load", type=int, help="seed of a machine whose load varies")
    replaying.add_argument("--jobs", type=int, default=1, help="processes at a time")
    replaying.add_argument("--times", action="store_true", help="print how long the rules take")
    replaying.add_argument("--save", type=Path)
    replaying.add_argument("--compare", type=Path)
    replaying.add_argument("--freeze", type=Path)
    replaying.add_argument("--against", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if args.command == "record":
        return min(1, record(args.out, args.only, args.seed))
    paths = [p for p in sorted(args.folder.glob("*.npz")) if fnmatch(p.stem, f"{args.only}.*")]
    if not paths:
        parser.error(f"there is no recorded run {args.only} in {args.folder}")
    began, rows = time.monotonic(), list[Row]()
    with ProcessPoolExecutor(args.jobs) as pool:
        machine = Machine(norms_every=args.norms, seed=args.load)
        judge = partial(replayed, intervals=args.every, machine=machine)
        for some in pool.map(judge, paths) if args.jobs > 1 else map(judge, paths):
            rows += some
    if args.times:
        for name, _, times_s, _ in rows:
            show_times(name, times_s)
        show_times("all", [[s for row in rows for s in row[2][full]] for full in (0, 1)])
    show_full_steps(rows, args.every)
    verdicts = {name: alerts for name, alerts, *_ in rows}
    count = sum(map(len, verdicts.values()))
    print(f"{len(rows)} replays, {count} alerts, {time.monotonic() - began:.1f} s")
    if args.save:
        args.save.write_text(json.dumps(verdicts, indent=1), encoding="utf-8")
    lines = []
    if args.compare:
        lines = differences(json.loads(args.compare.read_text(encoding="utf-8")), verdicts)
        print("\n".join(lines) or "no difference")
    short = brief(verdicts)
    if args.freeze:
        rows_of = ",\n".join(f"{json.dumps(n)}: {json.dumps(v)}" for n, v in sorted(short.items()))
        args.freeze.write_text(f"{{\n{rows_of}\n}}\n", encoding="utf-8")
    if args.against:
        lines += (faults := judged(json.loads(args.against.read_text(encoding="utf-8")), short))
        print("\n".join(faults) or "nothing lost, no new false alarm, no later p90")
    return min(1, len(lines))


if __name__ == "__main__":
    sys.exit(main())
