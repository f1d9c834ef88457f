"""Judges the alerts on real training runs and on faultbench, and prints one table.

    python benchmarks/realruns.py [--bench realruns,runs,faultbench] [--every 10 100]
        [--seed 0 1] [--only NAME,NAME] [--jobs 2] [--verbose] [--json FILE]

``realruns`` are in ``../shared/realruns`` and are skipped where they are missing, as is
faultbench; ``runs`` are those in ``benchmarks/runs``. Each run has a separate process. faultbench
has its own ``every_n_steps``, 10.

Every run has a label with the alerts that a practitioner expects (see ``runs/labels.py``).
A note of the right kind counts as found, and no note counts as a false alarm.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from telemetry import Alert, HookLogger

HERE = Path(__file__).resolve().parent
SHARED = HERE.parents[1] / "shared"
BENCHES = ("realruns", "runs", "faultbench")
ADDITIONAL = {
    *("exponential_trend", "unbounded_loss", "layers_not_learning"),
    *("output_collapse", "weight_jump"),
    "wrong_loss_input",
}
"""Kinds that labels may not contain: next to the expected kind or instead of it, they are right."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Expected alerts of a run.

    Attributes:
        want: ``H`` nothing, ``F`` one of ``kinds``, ``G`` the same but silence is no error, ``A``
            nothing or one of ``kinds``.
        kinds, layers, onset, by: As in ``runs/labels.py``.
    """

    want: str
    kinds: frozenset[str]
    layers: tuple[str, ...]
    onset: int
    by: int | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run and its alerts.

    Attributes:
        verdict: ``ok``, or the fault in capitals.
        layer: Whether the right layer is named; None if it does not matter or no alert was raised.
        entries: The most alerts of one kind, ends left out.
        notes: How many alerts are notes, ends left out.
    """

    bench: str
    name: str
    every: int
    seed: int
    want: str
    verdict: str
    layer: bool | None
    entries: int
    notes: int
    alerts: list[dict[str, Any]]
    first_loss: float
    last_loss: float


class Log:
    """Log of a run: creates loggers as a user would, and keeps the losses."""

    def __init__(self, every: int, seed: int, folder: str) -> None:
        self.every, self.seed = every, seed
        self.losses: list[float] = []
        self.loggers: list[HookLogger] = []
        self._folder = folder

    def attach(
        self, model: nn.Module, optimizer: Optimizer | None = None, **options: Any
    ) -> HookLogger:
        """Logger with default settings in a separate directory."""
        logger = HookLogger(
            model,
            f"{self._folder}/{len(self.loggers)}",
            every_n_steps=self.every,
            optimizer=optimizer,
            **options,
        )
        self.loggers.append(logger)
        return logger

    def note(self, **figures: float) -> None:
        """Other output of a run is for the authors of its label."""


def load(bench: str) -> tuple[dict[str, Callable[[Log], None]], dict[str, Wanted]]:
    """Load the runs of a bench and their labels, by name; none if the bench is missing."""
    if bench == "runs":
        sys.path.insert(0, str(HERE))
        module = importlib.import_module("runs")
        labels = {
            name: Wanted(want="F" if label.kinds else "H", **_known(vars(label)))
            for name, label in module.LABELS.items()
        }
        return dict(module.RUNS), labels
    folder = SHARED / "realruns"
    if bench != "realruns" or not folder.is_dir():
        return {}, {}
    sys.path.insert(0, str(folder))
    library = importlib.import_module("lib")
    for part in ("healthy", "faulty"):
        importlib.import_module(part)
    known = importlib.import_module("labels").L
    labels = {name: Wanted(want=label["want"], **_known(label)) for name, label in known.items()}
    return {name: library.REG[name] for name in labels}, labels


def _known(label: dict[str, Any]) -> dict[str, Any]:
    kinds, layers = frozenset(label["kinds"]), tuple(label["layers"])
    return {"kinds": kinds, "layers": layers, "onset": label["onset"], "by": label["by"]}


def run_once(bench: str, name: str, every: int, seed: int) -> Outcome:
    """Train one run in this process and judge its alerts."""
    runs, labels = load(bench)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        log = Log(every, seed, folder)
        runs[name](log)
        alerts: list[Alert] = []
        for logger in log.loggers:
            logger.close()
            alerts += logger.alerts
    verdict, layer = judged(labels[name], alerts)
    new = [alert for alert in alerts if alert.stage != "resolved"]
    return Outcome(
        bench=bench,
        name=name,
        every=every,
        seed=seed,
        want=labels[name].want,
        verdict=verdict,
        layer=layer,
        entries=max(Counter(alert.kind for alert in new).values(), default=0),
        notes=sum(alert.severity == "note" for alert in new),
        alerts=[asdict(alert) for alert in alerts],
        first_loss=_mean(log.losses[:5]),
        last_loss=_mean(log.losses[-20:]),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def judged(label: Wanted, alerts: Iterable[Alert]) -> tuple[str, bool | None]:
    """The verdict, and whether the right layer is named."""
    new = [alert for alert in alerts if alert.stage != "resolved"]
    loud = [alert for alert in new if alert.severity != "note"]
    if label.want == "H":
        return "FALSE ALARM" if loud else "note" if new else "ok", None
    if label.want == "A":
        right = all(alert.kind in label.kinds | ADDITIONAL for alert in loud)
        return "silent" if not loud else "ok" if right else "WRONG KIND", None
    if any(alert.step < label.onset for alert in loud):
        return "EARLY", None
    matching = [a for a in new if a.kind in label.kinds and a.step >= label.onset]
    if not matching:  # a note of another kind is not misleading
        missed = "gap" if label.want == "G" else "MISSED"
        wrong = any(alert.kind not in ADDITIONAL for alert in loud)
        return ("WRONG KIND" if wrong else missed), None
    first = matching[0]
    layer = None
    if label.layers:
        named = [first.module_name or "", *re.findall(r"[\w.]+", f"{first.summary} {first.cause}")]
        layer = any(n == c or n.startswith(f"{c}.") for n in named for c in label.layers)
    return ("LATE" if label.by is not None and first.step > label.by else "ok"), layer


# --- many of them ----------------------------------------------------------------------------


def in_own_process(bench: str, name: str, every: int, seed: int) -> Outcome | str:
    """The outcome, or how the run ended if it failed."""
    command = [sys.executable, __file__, "--one", bench, name, str(every), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"{name} CRASHED: {done.stderr.strip().splitlines()[-1:]}"
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def faultbench(seed: int) -> dict[str, Any] | None:
    """Return the score of faultbench; None if it is missing."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "score.json"
        script = str(HERE / "faultbench.py")
        command = [sys.executable, script, "--no-baseline", "--seed", str(seed), "--json"]
        subprocess.run([*command, str(written)], stdout=subprocess.DEVNULL, check=True)
        if not written.exists():
            return None
        score: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))["score"]
        return score


HEADER = (
    "bench", "every", "seed", "healthy alarmed", "with a note", "faults found", "late", "missed",
    "wrong kind", "early", "layer named", "entries", "macro F1",
)  # fmt: skip


def row_of(outcomes: Sequence[Outcome]) -> tuple[object, ...]:
    """A line of the table: the runs of one bench, one ``every`` and one seed."""
    healthy = [o for o in outcomes if o.want == "H"]
    faulty = Counter(o.verdict for o in outcomes if o.want == "F")
    named = [o.layer for o in outcomes if o.layer is not None]
    one = outcomes[0]
    return (
        one.bench, one.every, one.seed,
        f"{sum(o.verdict == 'FALSE ALARM' for o in healthy)} of {len(healthy)}",
        sum(o.notes > 0 for o in healthy),
        f"{faulty['ok']} of {faulty.total()}", faulty["LATE"], faulty["MISSED"],
        faulty["WRONG KIND"], faulty["EARLY"], f"{sum(named)} of {len(named)}",
        max((o.entries for o in outcomes), default=0), "-",
    )  # fmt: skip


def row_of_score(score: dict[str, Any], seed: int) -> tuple[object, ...]:
    """The same for faultbench."""
    missed, named = len(score["missed"]), score["layer_acc_all"]
    found = f"{score['n_faulty'] - missed} of {score['n_faulty']}"
    alarmed = f"{len(score['false_alarms'])} of {score['n_healthy']}"
    return (
        "faultbench", 10, seed, alarmed, "-", found, "-", missed, len(score["wrong"]),
        len(score["early"]), f"{named:.0%}", "-", f"{score['macro_f1']:.3f}",
    )  # fmt: skip


def show(rows: Iterable[Sequence[object]]) -> str:
    """The table as text."""
    lines = [[str(cell) for cell in row] for row in (HEADER, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def described(outcome: Outcome, verbose: bool) -> str:
    """One run in a line, and all alerts below it if ``verbose``."""
    layer = {None: "", True: "layer ok", False: "LAYER WRONG"}[outcome.layer]
    alerts = [
        f"{a['kind']}@{a['step']}:{a['module_name'] or '-'}"
        + ("" if a["stage"] == "started" else f"({a['stage']})")
        for a in outcome.alerts
    ]
    losses = f"{outcome.first_loss:.4g} -> {outcome.last_loss:.4g}"
    head = f"{outcome.want} {outcome.name:<30} {outcome.verdict:<11} {layer:<11} loss {losses:<20}"
    messages = [f"      {a['severity']}: {a['summary']}" for a in outcome.alerts]
    return "\n".join([f"{head} {' '.join(alerts)}", *(messages if verbose else [])])


def main() -> None:
    warnings.filterwarnings("ignore")
    if sys.argv[1:2] == ["--one"]:
        bench, name, every, seed = sys.argv[2:]
        logging.getLogger("telemetry").setLevel(logging.CRITICAL)
        torch.set_num_threads(1)
        print(json.dumps(asdict(run_once(bench, name, int(every), int(seed)))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", default=",".join(BENCHES))
    parser.add_argument("--every", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--only", default="", help="names of runs, with commas between them")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--verbose", action="store_true", help="print the messages, too")
    parser.add_argument("--json", type=Path, help="write all outcomes here")
    args = parser.parse_args()
    only, rows, outcomes = set(filter(None, args.only.split(","))), [], []
    with ThreadPoolExecutor(args.jobs) as pool:
        for bench in args.bench.split(","):
            if bench == "faultbench":
                for seed, score in zip(args.seed, pool.map(faultbench, args.seed), strict=True):
                    rows += [row_of_score(score, seed)] if score else []
                continue
            names = [name for name in load(bench)[1] if not only or name in only]
            for every in args.every:
                for seed in args.seed:
                    of_these = []
                    jobs = [(bench, name, every, seed) for name in names]
                    for found in pool.map(lambda job: in_own_process(*job), jobs):
                        line = found if isinstance(found, str) else described(found, args.verbose)
                        print(line, flush=True)
                        of_these += [] if isinstance(found, str) else [found]
                    rows += [row_of(of_these)] if of_these else []
                    outcomes += of_these
    print("\n" + show(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))


if __name__ == "__main__":
    main()
