"""Keeps what the rules are told of real runs, and shows it to them again in seconds.

    python benchmarks/replay.py record --out DIR [--only GLOB] [--seed N]
    python benchmarks/replay.py replay DIR [--only GLOB] [--every 1 10 100] [--jobs N] [--times]
        [--save FILE] [--compare FILE]

``record`` trains all runs of faultbench, ``realruns`` and ``benchmarks/runs`` (the first two only
where ``../shared`` has them) once, and keeps each step in full, in one file for each logger of a
run; those that are there already are left out. ``replay`` gives each step to the default rules, in
full or with its norms alone, as a logger with that ``every_n_steps`` does: where it is due, and as
many steps after a rule has asked as in :class:`telemetry.schedule.FullSteps`. ``--save`` writes all
alerts; ``--compare`` lists those that differ from such a file, field by field, and fails then.

The files hold public attributes of ``StepRecord`` as plain arrays and JSON: a change to how records
are built has to change :func:`tensor_record` and :class:`Step` alone. Not kept are pictures, states
of generators, histograms but those of outputs and inputs, and facts of several ranks, which no run
has. The norms of a step are those that were taken with the rest of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
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
from telemetry.alert import alert_fields
from telemetry.alerts import default_rules
from telemetry.alerts.judging import Judge
from telemetry.failures import Failures
from telemetry.moments import Moments
from telemetry.pipeline import FullSteps, every
from telemetry.records import Layout, Module, Output, Parameter, TensorRecord
from telemetry.sketch import Sketch
from telemetry.testing import CapturedRun, capture_run

FACTS = (
    "step", "wall_time", "learning_rates", "scalars", "loss_scale", "skipped_steps", "skipped",
    "eval_mode",
)  # fmt: skip
FULL_FACTS = (
    "fingerprints", "examples", "total_grad_norm_before_clipping", "clipped_fraction",
)  # fmt: skip
BROKEN = ("nan_buffers", "nonfinite_parameters")  # also looked for where a gradient is not finite
NORMS = ("grad_norms", "grad_present", "grad_finite")
MARKS = ("trainable", "reached", "held")
TENSORS = ("inputs", "outputs", "output_grads", "grads", "weights", "second_moments")
WITH_HISTOGRAM = ("inputs", "outputs")
MOMENTS = (
    "count", "nan_count", "positive_inf_count", "negative_inf_count", "zero_count", "min", "max",
    "sum", "sum_squares", "sum_cubes", "sum_fourth_powers",
)  # fmt: skip
COUNTS = 5  # of these are whole

# --- recording -------------------------------------------------------------------------------


class Recorder(Rule):
    """Finds nothing, and keeps all that a rule is told."""

    def __init__(self, run: CapturedRun | None = None) -> None:
        self.run = run
        self._events: list[Any] = []  # of a loss its step and value, of a step a dict
        self._layouts: list[Layout] = []
        self._names: dict[str, int] = {}
        self._columns: dict[str, list[Any]] = defaultdict(list)

    def on_loss(self, step: int, loss: float) -> Sequence[Alert]:
        self._events.append([step, loss])
        return ()

    def __call__(self, record: StepRecord) -> Sequence[Alert]:
        if not record.full or record.ranks is not None:
            raise ValueError(f"step {record.step} is not one of one process, measured in full")
        if not self._layouts or self._layouts[-1] is not record.layout:
            self._layouts.append(record.layout)
        facts = {name: getattr(record, name) for name in (*FACTS, *FULL_FACTS, *BROKEN)}
        for name in (*NORMS, *MARKS):
            self._columns[name].append(getattr(record, name))
        parameters = [parameter.name for parameter in record.layout.parameters]
        ratios = record.update_ratios
        self._columns["has_ratio"].append([name in ratios for name in parameters])
        self._columns["ratios"].append([ratios.get(name, 0.0) for name in parameters])
        tensors = 0
        for kind, field in enumerate(TENSORS):
            for key, tensor in getattr(record, field).items():
                self._add(kind, key, tensor)
                tensors += 1
        facts |= {"layout": len(self._layouts) - 1, "tensors": tensors}
        self._events.append(facts)
        if self.run is not None:
            self.run.records.clear()  # they would fill the memory
        return ()

    def _add(self, kind: int, key: str | Output, tensor: TensorRecord) -> None:
        module, place = key if isinstance(key, Output) else (key, 0)
        name = self._names.setdefault(module, len(self._names))
        low, high = tensor.unit_min, tensor.unit_max
        units = -1 if low is None or high is None else low.size
        buckets = tensor.sketch.buckets if TENSORS[kind] in WITH_HISTOGRAM else np.empty(0)
        add = self._columns
        add["tensors"].append((kind, name, place, tensor.calls, units, buckets.size))
        add["moments"].append([getattr(tensor.sketch, moment) for moment in MOMENTS])
        if units > 0:
            add["unit_min"].append(low)
            add["unit_max"].append(high)
        if buckets.size:
            add["buckets"].append(buckets)
            add["counts"].append(tensor.sketch.counts)

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
        arrays: dict[str, NDArray[Any]] = {
            "text": np.frombuffer(json.dumps(text).encode(), np.uint8),
            "tensors": np.array(self._columns.pop("tensors", []), np.int32).reshape(-1, 6).T,
            "moments": np.array(self._columns.pop("moments", [])).reshape(-1, len(MOMENTS)).T,
        }
        arrays |= {name: np.concatenate(parts) for name, parts in self._columns.items()}
        counts = arrays.get("counts", np.empty(0))
        if (counts == counts.astype(np.uint32)).all():
            arrays["counts"] = counts.astype(np.uint32)
        path.parent.mkdir(parents=True, exist_ok=True)
        partly = path.with_suffix(".part.npz")
        np.savez_compressed(partly, **arrays)
        partly.rename(path)


class Log(realruns.Log):
    """Given to a run, and to faultbench as its adapter: records instead of logging."""

    def __init__(self, seed: int, stack: ExitStack) -> None:
        super().__init__(every=1, seed=seed, folder="")
        self.recorders: list[Recorder] = []
        self._stack = stack

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None, *_: Any) -> Any:
        self.recorders.append(recorder := Recorder())
        recorder.run = self._stack.enter_context(
            capture_run(model, every_n_steps=1, rules=[recorder], optimizer=optimizer)
        )
        return recorder.run

    def after_backward(self, step: int, loss: float) -> None:
        run = self.recorders[0].run
        assert run is not None
        run.log(loss=loss)

    def after_step(self, step: int, loss: float) -> None:
        """Everything happens at once."""


def all_runs(seed: int) -> dict[str, Callable[[Log], None]]:
    """What trains each run, by its bench and name; says which benches are not there."""
    found: dict[str, Callable[[Log], None]] = {}
    for bench in ("runs", "realruns"):
        runs = realruns.load(bench)[0]
        found |= {f"{bench}.{name}": train for name, train in runs.items()}
        if not runs:
            print(f"without {bench}: {realruns.SHARED / bench} is not there")
    library = faultbench.load_faultbench()
    if library is None:
        print(f"without faultbench: {faultbench.HOME} is not there")
        return found
    for index, case in enumerate(library.load_cases(str(faultbench.HOME))):
        # Without the optimizer, as the adapter of faultbench has it.
        train = partial(_train_case, library, case, seed, f"c{index:02}")
        found[f"faultbench.{case.name}"] = train
    return found


def _train_case(library: Any, case: Any, seed: int, case_id: str, log: Log) -> None:
    class Adapter:
        after_backward, after_step = log.after_backward, log.after_step

        def attach(self, model: nn.Module, optimizer: Optimizer, info: object) -> None:
            log.attach(model)

    library.train(case, Adapter(), seed=seed, case_id=case_id)


def record(out: Path, only: str, seed: int) -> bool:
    """Record what is not there yet; whether all of it could be."""
    good = True
    for name, train in all_runs(seed).items():
        if not fnmatch(name, only) or (out / f"{name}.0.npz").exists():
            continue
        began = time.monotonic()
        torch.manual_seed(seed)
        try:
            with ExitStack() as stack:
                train(log := Log(seed, stack))
        except Exception as error:  # the others are recorded all the same
            traceback.print_exc()
            print(f"{name} FAILED: {error!r}", flush=True)
            good = False
            continue
        paths = [out / f"{name}.{index}.npz" for index in range(len(log.recorders))]
        for path, recorder in reversed([*zip(paths, log.recorders, strict=True)]):
            recorder.save(path)
        size = sum(path.stat().st_size for path in paths) / 1e6
        print(f"{name:<50} {time.monotonic() - began:6.1f} s {size:7.2f} MB", flush=True)
    return good


# --- reading ---------------------------------------------------------------------------------


class Recorded:
    """A file of :class:`Recorder`."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as arrays:
            self.arrays = {name: arrays[name] for name in arrays.files}
        text = json.loads(self.arrays.pop("text").tobytes())
        self.names: list[str] = text["names"]
        self._events: list[Any] = text["events"]
        self._layouts = [
            Layout(
                modules=tuple(Module(name=n, type_name=t) for n, t in layout["modules"]),
                parameters=tuple(
                    Parameter(name=n, module_name=m, shape=tuple(s))
                    for n, m, s in layout["parameters"]
                ),
            )
            for layout in text["layouts"]
        ]
        self.tensors = self.arrays["tensors"].T
        units, buckets = self.tensors[:, 4].clip(min=0), self.tensors[:, 5]
        self.first_unit, self.first_bucket = units.cumsum() - units, buckets.cumsum() - buckets
        self.moments = self.arrays["moments"].T

    def __iter__(self) -> Iterator[Step | tuple[int, float]]:
        """Steps, and losses as they were logged before them: step and value."""
        parameter = tensor = 0
        for event in self._events:
            if isinstance(event, list):
                yield event[0], event[1]
                continue
            layout, tensors = self._layouts[event.pop("layout")], event.pop("tensors")
            yield Step(self, event, layout, parameter, range(tensor, tensor + tensors))
            parameter, tensor = parameter + len(layout.parameters), tensor + tensors


class Step:
    """A step, of which records are made."""

    def __init__(
        self, file: Recorded, facts: dict[str, Any], layout: Layout, first: int, tensors: range
    ) -> None:
        self.number: int = facts["step"]
        self._file, self._layout, self._rows = file, layout, tensors
        self._parameters = slice(first, first + len(layout.parameters))
        self._facts = {
            name: tuple(fact) if isinstance(fact, list) else fact for name, fact in facts.items()
        }
        self._detail: dict[str, Any] | None = None

    def record(self, *, full: bool) -> StepRecord:
        """With everything, or as at a step at which only norms are taken."""
        norms: dict[str, Any] = {name: self._of_parameters(name) for name in NORMS}
        known = FACTS if norms["grad_finite"].all() and not full else (*FACTS, *BROKEN)
        facts = {name: self._facts[name] for name in known}
        if full and self._detail is None:
            self._detail = self._read()
        detail = (self._detail or {}) if full else {}
        return StepRecord(layout=self._layout, full=full, **norms, **facts, **detail)

    def _of_parameters(self, name: str) -> NDArray[Any]:
        column: NDArray[Any] = self._file.arrays[name][self._parameters]
        return column

    def _read(self) -> dict[str, Any]:
        detail: dict[str, Any] = {name: self._facts[name] for name in FULL_FACTS}
        detail |= {name: self._of_parameters(name) for name in MARKS}
        ratios, has = self._of_parameters("ratios"), self._of_parameters("has_ratio")
        names = [parameter.name for parameter in self._layout.parameters]
        detail["update_ratios"] = {
            name: float(ratio)
            for name, ratio, known in zip(names, ratios, has, strict=True)
            if known
        }
        tensors: dict[str, dict[Any, TensorRecord]] = {field: {} for field in TENSORS}
        for row in self._rows:
            kind, name, place = self._file.tensors[row, :3].tolist()
            module, field = self._file.names[name], TENSORS[kind]
            key = Output(module, place) if field.startswith("output") else module
            tensors[field][key] = tensor_record(self._file, row)
        return detail | tensors


def tensor_record(file: Recorded, row: int) -> TensorRecord:
    """One tensor of a step."""
    calls, units, buckets = file.tensors[row, 3:].tolist()
    values: list[Any] = file.moments[row].tolist()
    values[:COUNTS] = map(int, values[:COUNTS])
    unit, bucket = int(file.first_unit[row]), int(file.first_bucket[row])
    moments = Moments(**dict(zip(MOMENTS, values, strict=True)))
    sketch = Sketch.of(moments, np.empty(0, np.int16), np.empty(0))
    if buckets:
        some = slice(bucket, bucket + buckets)
        counts = file.arrays["counts"][some].astype(np.float64)
        sketch = Sketch.of(moments, file.arrays["buckets"][some], counts)
    if units < 0:
        return TensorRecord(sketch=sketch, calls=calls)
    empty, some = np.empty(0, np.float32), slice(unit, unit + units)
    lows, highs = (file.arrays.get(name, empty)[some] for name in ("unit_min", "unit_max"))
    return TensorRecord(sketch=sketch, calls=calls, unit_min=lows, unit_max=highs)


# --- replaying -------------------------------------------------------------------------------

Verdicts = dict[str, list[dict[str, Any]]]
"""The fields of all alerts, by run, logger and every_n_steps."""


class _Raising(Failures):
    """A rule that raises is not passed over."""

    def report(self, doing: str) -> None:
        raise


class Replay:
    """The default rules, which are shown a run as a logger with this ``every_n_steps`` does."""

    def __init__(self, every_n_steps: int) -> None:
        self.alerts: list[Alert] = []
        self.times_s: dict[bool, list[float]] = {True: [], False: []}  # by whether it was full
        self._full_steps = FullSteps(every(every_n_steps))
        self._judge = Judge(default_rules(), _Raising())
        self._loss_s = 0.0

    def show(self, event: Step | tuple[int, float]) -> None:
        """The next step or loss."""
        if isinstance(event, tuple):
            began = time.perf_counter()
            self.alerts += self._judge.judge_loss(*event)
            self._loss_s += time.perf_counter() - began
            return
        record = event.record(full=self._full_steps(event.number))
        began = time.perf_counter()
        self.alerts += self._judge.judge(record)
        self.times_s[record.full].append(self._loss_s + time.perf_counter() - began)
        self._loss_s = 0.0
        self._full_steps.see(record.step, record.total_grad_norm**2)
        self._full_steps.answer(record.step, wanted=self._judge.wants_full)


Row = tuple[str, list[dict[str, Any]], dict[bool, list[float]]]


def replayed(path: Path, intervals: Sequence[int]) -> list[Row]:
    """For each interval its name, the fields of the alerts, and how long rules took."""
    torch.set_num_threads(1)
    replays = {n: Replay(n) for n in intervals}
    raised: list[dict[str, Any]] = []
    try:
        for event in Recorded(path):
            for replay in replays.values():
                replay.show(event)
    except Exception as error:  # of a rule: a difference like others
        raised = [{"kind": "raised", "stage": "", "step": -1, "message": repr(error)}]
    name = path.name.removesuffix(".npz")
    return [
        (f"{name} every {n}", [*map(alert_fields, replay.alerts), *raised], replay.times_s)
        for n, replay in replays.items()
    ]


def differences(before: Verdicts, now: Verdicts) -> list[str]:
    """Each alert that appeared, vanished or changed, in a few lines."""
    lines = [f"{name}: not in the verdicts" for name in now.keys() - before.keys()]
    for name in sorted(now.keys() & before.keys()):
        old = [json.loads(json.dumps(alert)) for alert in before[name]]
        new = [json.loads(json.dumps(alert)) for alert in now[name]]
        for alert in [a for a in old if a in new]:
            if alert in new:
                old.remove(alert)
                new.remove(alert)
        for alert in new:
            same = [a for a in old if (a["kind"], a["stage"]) == (alert["kind"], alert["stage"])]
            if not same:
                lines.append(f"{name}: appeared: {_told(alert)}")
                continue
            old.remove(same[0])
            lines.append(f"{name}: changed: {_told(same[0])}")
            lines += [
                f"    {field}: {same[0].get(field)!r} -> {value!r}"
                for field, value in alert.items()
                if value != same[0].get(field)
            ]
        lines += [f"{name}: vanished: {_told(alert)}" for alert in old]
    return lines


def _told(alert: Mapping[str, Any]) -> str:
    where = f" in {alert['module_name']}" if alert.get("module_name") else ""
    message = str(alert["message"]).splitlines()[0]
    return f"{alert['kind']}{where} ({alert['stage']}) at step {alert['step']}: {message}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording, replaying = commands.add_parser("record"), commands.add_parser("replay")
    for command in (recording, replaying):
        command.add_argument("--only", default="*", help="such as 'realruns.gpt*'")
    recording.add_argument("--out", type=Path, required=True)
    recording.add_argument("--seed", type=int, default=0)
    replaying.add_argument("folder", type=Path)
    replaying.add_argument("--every", type=int, nargs="+", default=[1, 10, 100])
    replaying.add_argument("--jobs", type=int, default=1, help="processes at a time")
    replaying.add_argument("--times", action="store_true", help="print how long the rules take")
    replaying.add_argument("--save", type=Path)
    replaying.add_argument("--compare", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if args.command == "record":
        return 0 if record(args.out, args.only, args.seed) else 1
    paths = sorted(p for p in args.folder.glob("*.npz") if fnmatch(p.name, f"{args.only}.*npz"))
    if not paths:
        parser.error(f"{args.folder} has no recorded run {args.only}")
    began, rows = time.monotonic(), list[Row]()
    judge = partial(replayed, intervals=args.every)
    with ProcessPoolExecutor(args.jobs) as pool:
        for some in pool.map(judge, paths) if args.jobs > 1 else map(judge, paths):
            rows += some
    if args.times:
        show_times(rows)
    verdicts = {name: alerts for name, alerts, _ in rows}
    told = sum(map(len, verdicts.values()))
    print(f"{len(rows)} replays, {told} alerts, {time.monotonic() - began:.1f} s")
    if args.save:
        args.save.write_text(json.dumps(verdicts, indent=1), encoding="utf-8")
    if not args.compare:
        return 0
    before = json.loads(args.compare.read_text(encoding="utf-8"))
    lines = differences(before, verdicts)
    print("\n".join(lines) or "no difference")
    return 1 if lines else 0


def show_times(rows: Sequence[Row]) -> None:
    """Medians of what judging a step takes, of each replay and of all."""
    everything: dict[bool, list[float]] = {True: [], False: []}
    for name, _, times_s in rows:
        print(f"{name:<60} " + _medians(times_s))
        for full, some in times_s.items():
            everything[full] += some
    print(f"{'all':<60} " + _medians(everything))


def _medians(times_s: Mapping[bool, Sequence[float]]) -> str:
    return "  ".join(
        f"{word} {1e6 * median(times_s[full]):8.1f} us" if times_s[full] else f"{word} {'-':>11}"
        for full, word in ((False, "light"), (True, "full"))
    )


if __name__ == "__main__":
    sys.exit(main())
