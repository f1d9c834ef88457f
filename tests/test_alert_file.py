"""The lines of alerts.jsonl: whose they are, and that each is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from disks import fill
from known_runs import alert_at

from telemetry.events.plain_files import PlainFiles
from telemetry.page_format import decode_alert
from telemetry.writing.alert_file import AlertFile


def read_lines(log_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (log_dir / "alerts.jsonl").read_text().splitlines()]


def test_a_line_is_an_alert_and_says_when_it_was_and_in_which_session(tmp_path: Path) -> None:
    files = PlainFiles("runs/x")
    alert = alert_at(3, "layer", value=float("inf"), message="two\nlines")

    AlertFile(tmp_path, session="first", files=files).write(alert, 12.5)
    AlertFile(tmp_path, session="second", files=files).write(alert_at(2, None), 13.5)
    files.close()

    assert decode_alert((tmp_path / "alerts.jsonl").read_bytes().splitlines()[0]) == alert
    found = [(line["step"], line["session"], line["wall_time"]) for line in read_lines(tmp_path)]
    assert found == [(3, "first", 12.5), (2, "second", 13.5)]


def test_an_alert_that_a_full_disk_refused_is_written_when_there_is_room(tiny_disk: Path) -> None:
    files = PlainFiles("runs/x")
    alerts = AlertFile(tiny_disk, session="first", files=files)
    alerts.write(alert_at(0, None), 0.0)
    files.flush()
    ballast = fill(tiny_disk)

    alerts.write(alert_at(1, None, message="x" * 5000), 1.0)
    files.flush()
    assert [line["step"] for line in read_lines(tiny_disk)] == [0]
    alerts.write(alert_at(2, None), 2.0)
    ballast.unlink()
    files.close()

    assert [line["step"] for line in read_lines(tiny_disk)] == [0, 1, 2]


def test_a_remote_directory_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = PlainFiles("memory://run")
    AlertFile("memory://run", session="first", files=files).write(alert_at(0, None), 0.0)
    files.close()
    assert list(tmp_path.iterdir()) == []
