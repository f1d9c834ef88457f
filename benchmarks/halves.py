"""Scores replayed verdicts on two halves of all benches, split by family.

    python benchmarks/halves.py VERDICTS [--half 0|1] [--verbose]

VERDICTS is a file that ``replay.py --save`` wrote. While you change a rule, look at one half alone
(``--half 0 --verbose`` lists what is wrong there); the figures of the other half are the result. A
family is the model or task of a run: the first word of its name, so that a fault and its healthy
twin are in one half. F1 counts runs: a fault is found if the right kind is reported at its onset or
later; a wrong kind, an early alert and an alarm in a healthy run are false.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from zlib import crc32

import faultbench
import realruns
import replay

from telemetry import Alert

JUDGED = [
    "kind",
    "severity",
    "step",
    "module_name",
    "value",
    "threshold",
    "summary",
    "cause",
    "stage",
]
UNRECORDED = {"attention_collapse", "expert_collapse", "input_bound", "memory_growth"}
"""Kinds that judge what a recording has not: heads in a kernel, loads, times, memory."""


def half_of(run: str) -> int:
    """The half to which a run belongs, by bench and name."""
    family = run.partition(".")[2].partition("_")[0]
    return crc32(family.encode()) % 2


@cache
def labels() -> dict[str, realruns.Wanted]:
    """Expected alerts of each run, by bench and name."""
    known = {
        f"{bench}.{name}": label
        for bench in ("runs", "realruns")
        for name, label in realruns.load(bench)[1].items()
    }
    library = faultbench.load_faultbench()
    for bench, home in faultbench.HOMES.items():
        for case in library.load_cases(str(home)) if library else ():
            kinds = {ours for ours, kind in faultbench.KINDS.items() if kind == case.kind}
            known[f"{bench}.{case.name}"] = realruns.Wanted(
                want="F" if kinds else "H" if case.label == "healthy" else "A",
                kinds=frozenset(kinds | {*case.also}),
                layers=tuple(case.culprits),
                onset=case.onset,
                by=None,
            )
    return known


def judged(verdicts: Mapping[str, Sequence[replay.Fields]]) -> dict[str, tuple[str, bool | None]]:
    """Verdict, and whether the right layer is named, of each replay."""
    found: dict[str, list[Alert]] = defaultdict(list)
    for name, fields in verdicts.items():
        run = replay.run_of(name)
        alerts = [Alert(**{field: one[field] for field in JUDGED}) for one in fields]
        found[f"{run} {name.partition(' ')[2]}"] += alerts  # of all its loggers
    return {
        name: realruns.judged(labels()[run], alerts)
        for name, alerts in found.items()
        if (run := name.partition(" ")[0]) in labels()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verdicts", type=Path)
    parser.add_argument("--half", type=int, choices=(0, 1))
    parser.add_argument("--verbose", action="store_true", help="list what is wrong")
    args = parser.parse_args()
    all_judged = judged(json.loads(args.verdicts.read_text(encoding="utf-8")))
    print(
        "|half|every|healthy with an alert|faults found|F1|right layer|\n|--:|--:|--:|--:|--:|--:|"
    )
    for half in (0, 1) if args.half is None else (args.half,):
        by_interval: dict[str, Counter[str]] = defaultdict(Counter)
        for name, (verdict, layer) in all_judged.items():
            run, every = name.split(" every ")
            want = labels()[run].want
            if half_of(run) != half or want not in "HF" or labels()[run].kinds & UNRECORDED:
                continue
            is_right = verdict in ("ok", "LATE", "note")
            by_interval[every].update({want: 1, f"{want} right": is_right, "wrong": not is_right})
            by_interval[every].update(named=layer is not None, layer=bool(layer))
            by_interval[every]["missed"] += verdict == "MISSED"
            if args.verbose and (not is_right or layer is False):
                print(f"    {name}: {verdict}, layer {layer}")
        for every, n in sorted(by_interval.items(), key=lambda item: int(item[0])):
            f1 = 2 * n["F right"] / max(1, 2 * n["F right"] + n["wrong"])
            alarmed = f"{n['H'] - n['H right']} of {n['H']}"
            found, named = f"{n['F right']} of {n['F']}", f"{n['layer']} of {n['named']}"
            print(f"|{half}|{every}|{alarmed}|{found}|{f1:.3f}|{named}|")


if __name__ == "__main__":
    main()
