"""Measures how far each limit of a detector is from healthy runs and from faults.

    python benchmarks/margins.py DIR [--only GLOB] [--every 10] [--jobs N] [--table FILE]

DIR has recordings of ``replay.py``. Each is replayed once with the default rules. Then each
detector judges the same records, also with one limit multiplied or divided, and nothing that
another kind explains is suppressed. Where the largest of :data:`FACTORS` changes no verdict, no
smaller one is tried. A limit's margin to healthy runs is the smallest factor at which a healthy run
gets a warning that it has not with the default; to faults, at which the kind is no longer found in
a run in which it is right to find it. A limit with neither is one that no recording needs.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import replay
import torch

from telemetry.alerts.baseline import Baseline
from telemetry.alerts.configuration import DETECTORS
from telemetry.alerts.detector import Detector
from telemetry.records import StepRecord
from telemetry.rule import Rule

FACTORS = (1.5, 3.0)  # ascending
DEFAULT = ("", 1.0)

Change = tuple[str, float]
"""A limit, and the factor by which it is multiplied."""


def changes(kind: str) -> Iterator[Change]:
    """The default, and each limit of a detector with each factor that it may have."""
    yield DEFAULT
    for name in DETECTORS[kind].limits():
        for factor in sorted([*FACTORS, *[1 / factor for factor in FACTORS]]):
            value = getattr(DETECTORS[kind](), name) * factor
            if not (value > 1 and name.endswith(("fraction", "share"))):
                yield name, factor


@dataclass
class Records(Rule):
    """Rule that finds nothing and keeps what it is given."""

    kept: list[StepRecord] = field(default_factory=list)

    def __call__(self, record: StepRecord) -> tuple[()]:
        self.kept.append(record)
        return ()


Variant = tuple[str, Change]
"""A kind with one of its limits changed."""


def alarming(records: Iterable[StepRecord], variants: Iterable[Variant]) -> set[Variant]:
    """The variants that find something in a run that is not a note."""
    baseline, found = Baseline(), set[Variant]()
    judges = {variant: _made(*variant) for variant in variants}
    for record in records if judges else ():
        baseline.add(record)
        for variant, detector in judges.items():
            alerts = detector.evaluate(record, baseline)
            if any(alert.severity != "note" and alert.stage != "resolved" for alert in alerts):
                found.add(variant)
        # One whose verdict is known need not go on.
        judges = {variant: of for variant, of in judges.items() if variant not in found}
    return found


def _made(kind: str, change: Change) -> Detector:
    name, factor = change
    made = DETECTORS[kind]
    if not name:
        return made()
    value = getattr(made(), name) * factor
    return made(**{name: max(round(value), 1) if isinstance(getattr(made(), name), int) else value})


def measured(path: Path, every_n_steps: int) -> dict[str, set[Change]]:
    """With which changes each kind is found in a run; in a faulty one, of the kinds found there."""
    torch.set_num_threads(1)
    file, run = replay.Recorded(path), path.stem.rpartition(".")[0]
    replayed = replay.Replay(every_n_steps, others=[records := Records()])
    for event in file.events:
        replayed.show(file, event)
    replayed.judge_up_to(math.inf)
    kinds = {*DETECTORS}
    if replay.onsets().get(run) is not None:
        kinds = {alert["kind"] for alert in replayed.alerts if alert["severity"] != "note"}
    found: dict[str, set[Change]] = defaultdict(set)
    for kind, change in all_alarming(records.kept, kinds):
        found[kind].add(change)
    return dict(found)


def all_alarming(records: Sequence[StepRecord], kinds: Iterable[str]) -> set[Variant]:
    """The variants of these kinds that find something in a run that is not a note.

    Where the largest factor changes no verdict, smaller ones are taken to change none.
    """
    sides = [
        [(kind, change) for change in side]
        for kind in kinds
        for name in DETECTORS[kind].limits()
        for side in sides_of(kind, name)
    ]
    found = alarming(records, [*[(kind, DEFAULT) for kind in kinds], *[side[-1] for side in sides]])
    nearer = set[Variant]()
    for side in sides:
        kind, is_found = side[-1][0], side[-1] in found
        if is_found != ((kind, DEFAULT) in found):
            nearer.update(side[:-1])
        elif is_found:
            found.update(side[:-1])
    return found | alarming(records, nearer)


def sides_of(kind: str, name: str) -> Iterator[list[Change]]:
    """Changes of a limit: those that make it larger, and those that make it smaller, nearest first.

    Omitted are sides without any: a share is at most 1.
    """
    some = [change for change in changes(kind) if change[0] == name]
    for side in ([c for c in some if c[1] > 1], [c for c in reversed(some) if c[1] < 1]):
        if side:
            yield side


@dataclass
class Margin:
    """Nearest runs on both sides of a limit: a factor and the name of a run; None: none.

    Attributes:
        healthy: At which a healthy run is alarmed.
        fault: At which a fault is no longer found.
    """

    healthy: tuple[float, str] | None = None
    fault: tuple[float, str] | None = None


def margins(found: Mapping[str, Mapping[str, set[Change]]]) -> dict[tuple[str, str], Margin]:
    """The margin of each limit, by kind and name.

    Args:
        found: Of each recording, by bench and name, what :func:`measured` returns.
    """
    result = {(kind, name): Margin() for kind in DETECTORS for name in DETECTORS[kind].limits()}
    for run, of_kinds in found.items():
        if run not in replay.onsets():
            continue
        is_healthy = replay.onsets()[run] is None
        for kind in DETECTORS:
            some = of_kinds.get(kind, set())
            if is_healthy == (DEFAULT in some):
                continue  # a fault that this kind does not find, or a healthy run that it accuses
            for change in changes(kind):
                name, factor = change
                distance = max(factor, 1 / factor)
                if change == DEFAULT or (change in some) == (not is_healthy):
                    continue
                margin = result[kind, name]
                side = "healthy" if is_healthy else "fault"
                nearest = getattr(margin, side)
                if nearest is None or (distance, run) < (
                    max(nearest[0], 1 / nearest[0]),
                    nearest[1],
                ):
                    setattr(margin, side, (factor, run))
    return result


def table(of: Mapping[tuple[str, str], Margin]) -> str:
    """The margins in Markdown, of the limits that have one."""
    lines = ["|kind|limit|value|to a healthy run|to a fault|", "|---|---|--:|---|---|"]
    for (kind, name), margin in sorted(of.items()):
        if margin == Margin():
            continue
        cells = [_cell(side) for side in (margin.healthy, margin.fault)]
        value = getattr(DETECTORS[kind](), name)
        lines.append(f"|`{kind}`|`{name}`|{value:g}|{'|'.join(cells)}|")
    return "\n".join(lines)


def _cell(side: tuple[float, str] | None) -> str:
    if side is None:
        return "–"
    factor, run = side
    return f"{factor:.2g}, {run.partition('.')[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="*", help="bench and name, as 'realruns.gpt*'")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--table", type=Path, help="write the table here")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    paths = [p for p in sorted(args.folder.glob("*.npz")) if fnmatch(p.stem, f"{args.only}.*")]
    found: dict[str, dict[str, set[Change]]] = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        of_run = partial(measured, every_n_steps=args.every)
        for path, kinds in zip(paths, pool.map(of_run, paths), strict=True):
            for kind, some in kinds.items():
                found.setdefault(path.stem.rpartition(".")[0], {}).setdefault(kind, set()).update(
                    some
                )
            found.setdefault(path.stem.rpartition(".")[0], {})
    text = table(margins(found))
    print(text)
    if args.table:
        args.table.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
