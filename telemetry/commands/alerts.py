"""``telemetry help``, ``alerts``: kinds of alerts, and the alerts of runs."""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from rich.console import Console
from rich.text import Text

from telemetry.alert import Alert
from telemetry.alerts.configuration import KINDS
from telemetry.alerts.detector import Detector
from telemetry.commands.output import LogDirs, as_json, print_records
from telemetry.events.run_log import Alerted
from telemetry.plain_text import closest, printable

_WIDTH = 100
_POLL_S = 0.5
# The kinds of each family, the most usual first; each has a page in docs/alerts/.
FAMILIES: Mapping[str, Sequence[str]] = {
    "Explosions and NaN": (
        "exploding_gradient", "exploding_activation", "nonfinite", "weight_jump",
        "exponential_trend",
    ),
    "Layers that stop learning": (
        "vanishing_gradient", "dead_units", "saturated_units", "layers_not_learning",
        "untrained_parameters", "output_collapse", "expert_collapse",
    ),
    "The loss": (
        "loss_divergence", "loss_spike", "loss_stuck", "no_learning", "unbounded_loss",
    ),
    "Mistakes in the loop": (
        "wrong_loss_input", "eval_mode", "same_batch", "learning_rate_zero",
        "loss_at_start", "input_ignored", "input_scale", "batch_leak",
    ),
    "Attention": ("attention_collapse",),
    "Time and memory": ("input_bound", "memory_growth"),
    "Several ranks": ("ranks_diverge", "ranks_same_batch"),
}  # fmt: skip


def documentation(detector: type[Detector]) -> tuple[str, Mapping[str, str], str]:
    """Return the first two paragraphs of a detector's docstring.

    They are a summary; texts of Evidence, Causes, Remedies and Silent; and code that produces the
    alert, which may be empty.
    """
    summary, sections, *_ = [*inspect.cleandoc(detector.__doc__ or "").split("\n\n"), ""]
    texts = dict(re.findall(r"^(\w+):(.*(?:\n +.*)*)", sections, re.MULTILINE))
    example = textwrap.dedent(texts.pop("Example", "").removeprefix("\n")).strip()
    return _one_line(summary), {name: _one_line(text) for name, text in texts.items()}, example


def help_line(kinds: Iterable[str]) -> str | None:
    """Return the line that names the help of the first known kind; None if no kind is known."""
    known = next((kind for kind in kinds if kind in KINDS), None)
    return known and f"telemetry help {known} explains it"


def print_help(args: argparse.Namespace, console: Console) -> int:
    if args.kind is None:
        for family, kinds in FAMILIES.items():
            console.print(family, style="bold")
            for kind in kinds:
                summary, *_ = documentation(KINDS[kind])
                first = re.split(r"(?<=[.:]) ", summary)[0].rstrip(":.")
                line = f"  {kind:<21} {KINDS[kind].severity:<8} {_plain(first)}"
                console.print(line, overflow="ellipsis", no_wrap=True, soft_wrap=False)
        return 0
    if args.kind not in KINDS:
        raise ValueError(f"no alert has the name {args.kind!r}; {closest(args.kind, KINDS)}")
    for line in _text(KINDS[args.kind], min(console.width, _WIDTH)):
        console.print(line)
    return 0


def _text(detector: type[Detector], width: int) -> Iterator[str]:
    summary, sections, example = documentation(detector)
    yield f"{detector.kind} ({detector.severity})"
    yield from textwrap.wrap(_plain(summary), width)
    yield ""
    for name, text in sections.items():
        yield from _wrapped(f"{name}: {text}", width)
    causes = sorted(detector.explained_by)
    if detector.explained_by_rate_jump:
        causes.append("a jump of the learning rate")
    if causes:
        yield from _wrapped(f"May follow from: {', '.join(causes)}.", width)
    if example:
        yield from ["", "Example:", *textwrap.indent(example, "    ").splitlines()]
    if limits := detector.limits():
        yield from ["", f"Parameters, for HookLogger(alerts={{{detector.kind!r}: {{...}}}}):"]
        for name, meaning in limits.items():
            yield from _wrapped(f"{name} = {getattr(detector, name):g}: {meaning}", width)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(_plain(text), width, subsequent_indent="  ", break_long_words=False)


def _plain(text: str) -> str:
    return text.replace("``", "")


def _one_line(text: str) -> str:
    return " ".join(text.split())


# Severities that make the command fail, by the choice of ``--fail-on``.
FAIL_ON = {"warning": {"warning", "error"}, "error": {"error"}, "never": set[str]()}
_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_RECORD = (
    "run", "step", "severity", "kind", "module_name", "stage", "value", "threshold", "summary",
    "added", "measured_at", "cause", "advice", "location", "consequences", "observed_in", "batches",
)  # fmt: skip


def alerts(args: argparse.Namespace, console: Console) -> int:
    runs = LogDirs(args.runs)
    if args.follow:
        return _follow(runs, args, console)
    of_runs = [(str(log_dir), run.alerts) for log_dir, run in runs.opened()]
    fails = print_alerts(of_runs, args, console, name_runs=len(runs.found) > 1)
    return runs.status or fails


def _follow(runs: LogDirs, args: argparse.Namespace, console: Console) -> int:
    """Print alerts as they come, until a Ctrl-C; with ``--json``, an object in each line."""
    opened = [*runs.opened()]
    shown: dict[int, Alerted] = {}  # by identity; a resumed run hides some of the earlier ones
    with suppress(KeyboardInterrupt):
        while opened:
            for log_dir, run in opened:
                run.refresh()
                name = str(log_dir)
                found = {id(frame): frame for frame in run.frames(Alerted)}
                for alert in [found[key].alert for key in found if key not in shown]:
                    if args.form:
                        print(as_json(_RECORD, {"run": name, **vars(alert)}), flush=True)
                    else:
                        _print_alert(f"{printable(name)}: " * (len(opened) > 1), alert, console)
                shown |= found
            time.sleep(_POLL_S)
    return runs.status


def print_alerts(
    runs: Sequence[tuple[str, Sequence[Alert]]],
    args: argparse.Namespace,
    console: Console,
    *,
    name_runs: bool,
) -> bool:
    """Print the alerts of each run; return whether one of them counts for ``--fail-on``."""
    kinds: list[str] = []
    found = {a.severity for _, of_run in runs for a in of_run if a.stage != "resolved"}
    if args.form:
        records = ({"run": run, **vars(alert)} for run, of_run in runs for alert in of_run)
        print_records(args.form, _RECORD, records)
    else:
        for run, of_run in runs:
            head = f"{printable(run)}: " if name_runs else ""
            if not of_run:
                console.print(f"{head}no alerts")
            for alert in of_run:
                _print_alert(head, alert, console)
                kinds.append(alert.kind)
        if (line := help_line(kinds)) is not None:
            console.print(line)
    return bool(found & FAIL_ON[args.fail_on])


def _print_alert(head: str, alert: Alert, console: Console) -> None:
    severity = alert.severity, _STYLES[alert.severity]
    console.print(Text.assemble(head, severity, f": {printable(alert.title)}"))
    for text in alert.news.splitlines():
        console.print(f"  {printable(text)}")
