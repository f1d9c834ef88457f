"""Untrusted directories: the valid part is shown, and each invalid file is one line."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from telemetry.commands.cli import main
from telemetry.commands.export import write_report
from telemetry.commands.summary import summarize
from telemetry.flight import flight_files
from telemetry.layers import PAGE_STATISTICS
from telemetry.reading import payloads
from telemetry.reading.run import open_run
from telemetry.reading.run_data import RunData
from telemetry.reading.sources import FileSource
from tests.helpers.hostile_runs import KINDS, SCRIPT, STEPS, Kind, write_good_run
from tests.helpers.paths import ROOT

MOST_S = 30  # a loaded machine takes several times as long as a quiet one
COMMANDS = ["summary", "alerts", "explain", "report"]
# Kinds that could block forever or fill the memory; run in processes with limits on both.
LARGE = [
    "fifo", "endless device", "terminal", "endless alerts.jsonl", "endless flight file",
    "fifo as flight file", "record of 3 GiB", "100 GiB of zeros", "picture of 300 MB",
    "layout of 100 MB", "flight of 100 MB",
]  # fmt: skip
SMALL = [name for name in KINDS if name not in LARGE]
MEMORY_BYTES = 3 << 30


@pytest.fixture(autouse=True)
def _in_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End a test that blocks forever."""
    monkeypatch.setenv("COLUMNS", "140")
    old = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"took more than {MOST_S} s"))
    signal.alarm(MOST_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


@contextmanager
def hostile_run(name: str) -> Iterator[tuple[Path, Kind]]:
    """The directory of a run; it is removed at once, for some are large."""
    with tempfile.TemporaryDirectory() as folder:
        log_dir = Path(folder, "run")
        log_dir.mkdir()
        write_good_run(log_dir)
        KINDS[name].make(log_dir)
        yield log_dir, KINDS[name]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SMALL)
def test_intact_data_is_read_and_damage_is_reported_in_one_line(name: str) -> None:
    with hostile_run(name) as (log_dir, kind):
        run = RunData(FileSource(log_dir))
        overview = run.overview()
        assert [layer.name for layer in overview.layers] == list(kind.layers)
        assert 7 in [alert.step for alert in overview.alerts]
        for statistic in PAGE_STATISTICS:
            list(summarize(run, statistic))
        assert run.matrix("grad_norm").steps.tolist() == list(range(STEPS))
        assert run.matrix("weight_norm").steps.tolist() == list(range(STEPS))
        for layer in overview.layers:
            payloads.layer_series(*run.layer_series(layer.name))
            payloads.histograms(run.source, layer)
            for item in payloads.images(run.source, layer):
                for step in item["steps"]:
                    payloads.picture(run.source, item["tag"], step)
        payloads.scalars(run.source)
        if not kind.in_flight:
            assert len([line for line in run.source.problems if kind.said in line]) == bool(
                kind.said
            )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SMALL)
def test_every_command_handles_an_untrusted_directory(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with hostile_run(name) as (log_dir, kind):
        report = log_dir.parent / "report.html"
        for command in COMMANDS:
            options = ["-o", str(report)] if command == "report" else []
            status = main([command, str(log_dir), *options])
            none = command == "explain" and not flight_files(log_dir)
            assert status == (2 if none else command == "alerts")
            out, err = capsys.readouterr()
            assert all(c.isprintable() or c == "\n" for c in out + err)
            assert len(err.splitlines()) <= 51
            if command == "explain" and kind.in_flight:
                assert len([line for line in out.splitlines() if kind.said in line]) == 1
            if command == "report" and not kind.in_flight:
                assert kind.said in err
        html = report.read_text(encoding="utf-8")
        assert SCRIPT not in html
        assert report.stat().st_size < 10_000_000


@pytest.mark.parametrize("name", LARGE)
def test_commands_read_large_untrusted_directories_within_the_time_limit(name: str) -> None:
    with hostile_run(name) as (log_dir, kind):
        for command in ("alerts", "explain", "report"):
            began = time.monotonic()
            done = _run([command, str(log_dir)], log_dir.parent)
            assert time.monotonic() - began < MOST_S / 3
            none = command == "explain" and not flight_files(log_dir)
            assert done.returncode == (2 if none else command == "alerts"), done.stderr
            said = kind.said if kind.in_flight == (command == "explain") else ""
            assert said in done.stdout + done.stderr
            assert command != "alerts" or "step 7" in done.stdout


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_a_file_without_permission_is_reported_in_one_line() -> None:
    rights = "-dac_override,-dac_read_search"  # without these not even root may
    prefix = ["setpriv", "--bounding-set", rights, "--inh-caps", rights] if not os.geteuid() else []
    with hostile_run("unreadable file") as (log_dir, _):
        (log_dir.parent / "closed").mkdir(mode=0)
        done = _run(["alerts", str(log_dir.parent)], log_dir.parent, prefix)
    assert "step 7" in done.stdout
    assert done.stderr.count("Permission denied") == len(done.stderr.splitlines()) == 2


def _run(
    arguments: list[str], folder: Path, prefix: list[str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(prefix or []), sys.executable, "-m", "telemetry.commands.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=MOST_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
    )  # fmt: skip


def test_a_directory_whose_name_is_not_valid_text_has_a_report(tmp_path: Path) -> None:
    log_dir = tmp_path / os.fsdecode(b"run-\xff")
    log_dir.mkdir()
    write_good_run(log_dir)
    (log_dir / "flight-1.json").touch()
    write_report({log_dir: open_run(log_dir)}, tmp_path / "report.html")
    assert "run-" in (tmp_path / "report.html").read_text(encoding="utf-8")
