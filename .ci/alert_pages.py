"""Writes the sections of ``docs/alerts/`` from the docstrings of the detectors.

    python .ci/alert_pages.py

The text of a page before its first section is written by hand. A test compares the pages with the
docstrings.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

from telemetry.alerts.configuration import KINDS
from telemetry.alerts.detector import Detector
from telemetry.commands.alerts import FAMILIES, documentation

FOLDER = Path(__file__).parents[1] / "docs" / "alerts"
_NAMES = "explosions", "layers", "loss", "mistakes", "attention", "resources", "ranks"
PAGES = {f"{name}.md": kinds for name, kinds in zip(_NAMES, FAMILIES.values(), strict=True)}


def pages() -> Mapping[Path, str]:
    """Return the text of each page, with the part before its first section as it is."""
    texts = {}
    for name, kinds in PAGES.items():
        head = (FOLDER / name).read_text(encoding="utf-8").partition("\n## ")[0].rstrip("\n")
        sections = [_section(KINDS[kind]) for kind in kinds]
        texts[FOLDER / name] = "\n".join([head + "\n", *sections])
    return texts


def _section(detector: type[Detector]) -> str:
    summary, sections, example = documentation(detector)
    lines = [f"## {detector.kind}", ""]
    lines += [*_wrapped(f"**{detector.severity.title()}.** {summary}"), ""]
    for name, text in sections.items():
        if name != "Evidence":  # the alert shows it
            lines += _wrapped(f"- **{name}**: {text}", "  ")
    if example:
        lines += ["- **Example**:", "", "```python", example, "```"]
    if limits := detector.limits():
        lines += ["", "|parameter|default|meaning|", "|---|--:|---|"]
        for name, meaning in limits.items():
            lines.append(f"|`{name}`|{getattr(detector, name):g}|{_markdown(meaning)}|")
    return "\n".join(lines) + "\n"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        _markdown(text),
        115,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _markdown(text: str) -> str:
    return text.replace("``", "`")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
