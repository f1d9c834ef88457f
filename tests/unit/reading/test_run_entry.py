"""Table of runs: order, status, steps and alerts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from telemetry import Alert
from telemetry.events.page_format import Chunk, alert_tag, encode_alert, end_tag, layout_tag
from telemetry.reading.run_entry import RunEntry, run_entry

FIRST, SECOND = "20260101-120000.000000-aaaa", "20260102-120000.000000-bbbb"
FIRST_S = 1767268800.0  # 2026-01-01, 12:00 UTC


def series(step: int, wall_time: float = FIRST_S) -> SimpleNamespace:
    return SimpleNamespace(max_step=step, max_wall_time=wall_time)


def norms(session: str) -> str:
    return Chunk(kind="n", session=session, layout=0, number=0).tag


def tags_of(session: str, written_s: float = FIRST_S + 99) -> dict[str, SimpleNamespace]:
    return {layout_tag(session, 0): series(0), norms(session): series(99, written_s)}


def run(session: str = FIRST, written_s: float = FIRST_S + 99) -> RunEntry:
    return run_entry("run", tags_of(session, written_s))


def names(sessions: dict[str, str]) -> list[str]:
    """Return the listed runs of these sessions."""
    listing = {name: tags_of(session) for name, session in sessions.items()}
    entries = [run_entry(name, tags) for name, tags in listing.items()]
    return [entry.name for entry in sorted(entries, key=lambda entry: entry.order)]


def test_the_newest_run_comes_first_and_runs_of_one_start_in_natural_order() -> None:
    sessions = {"run10": FIRST, "old": FIRST, "new": SECOND, "run9": FIRST}
    assert names(sessions) == ["new", "old", "run9", "run10"]


def test_of_two_runs_that_started_in_the_same_second_the_later_is_newer() -> None:
    first, second = (f"20260301-000000.{part}-ffff" for part in ("100000", "200000"))
    assert names({"b": first, "a": second}) == ["a", "b"]


def test_a_session_without_a_time_in_its_id_started_with_its_layout() -> None:
    assert run(session="19990231-999999").started_s == FIRST_S
    assert run(session="mine", written_s=float("nan")).started_s == FIRST_S


@pytest.mark.parametrize(
    ("silent_s", "step_s", "status"),
    [(10, 1, "live"), (290, 1, "live"), (310, 1, "died"), (900, 60, "live"), (4000, 60, "died")],
)
def test_a_run_without_records_for_long_has_died(silent_s: int, step_s: int, status: str) -> None:
    entry = run(written_s=FIRST_S + 99 * step_s)
    assert entry.step_s == step_s
    assert entry.status(FIRST_S + 99 * step_s + silent_s) == status


def test_a_closed_run_has_ended_unless_it_continues() -> None:
    tags = {layout_tag(FIRST, 0): series(0), norms(FIRST): series(99), end_tag(FIRST): series(99)}
    assert run_entry("run", tags).status(FIRST_S + 1e6) == "ended"
    assert run_entry("run", tags).status(FIRST_S + 1, "RuntimeError") == "died"
    assert run_entry("run", tags | {norms(FIRST): series(100)}).status(FIRST_S + 1) == "live"
    tags |= {layout_tag(SECOND, 0): series(50), norms(SECOND): series(60, FIRST_S + 2e5)}
    assert run_entry("run", tags).status(FIRST_S + 2e5) == "live"


def test_steps_that_a_later_session_replaces_do_not_count() -> None:
    tags = {
        layout_tag(FIRST, 0): series(0),
        norms(FIRST): series(99),
        alert_tag(FIRST, 0): series(70),
        alert_tag(FIRST, 1): series(20),
        layout_tag(SECOND, 0): series(50),
        norms(SECOND): series(60),
    }
    entry = run_entry("run", tags)
    assert entry.last_step == 60
    assert entry.alert_tags == (alert_tag(FIRST, 1),)


@pytest.mark.parametrize(
    ("steps", "first"), [((300, 323), 300), ((200, 323), 323), ((323, 330), 323), ((300,), 300)]
)
def test_the_first_alert_of_a_run_is_a_note_shortly_before_a_warning(
    steps: tuple[int, ...], first: int
) -> None:
    """Notes are at steps below 323, a warning at 323 and later."""
    tags, texts = tags_of(FIRST), {}
    for number, step in enumerate(steps):
        tag = alert_tag(FIRST, number)
        tags[tag] = series(step)
        texts[tag] = encode_alert(
            Alert(
                kind="loss_spike" if step < 323 else "dead_units",
                severity="note" if step < 323 else "warning",
                step=step, module_name=None, value=1.0, threshold=0.0, summary="",
            )
        )  # fmt: skip
    tags[norms(FIRST)] = series(400)
    row = run_entry("run", tags).row(FIRST_S, texts, None, None)
    assert row["alert"]["step"] == first
