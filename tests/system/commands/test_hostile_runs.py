"""Untrusted directories: the valid part is shown, and each invalid file is one line."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.hostile_runs import KINDS, SCRIPT, STEPS, Kind, hostile_run, write_good_run
from tests.helpers.scripts import run_script
from tests.helpers.shell import call
from tests.helpers.views import ReadView

WATCHDOG_S = 300
COMMANDS = ["summary", "alerts", "explain", "report"]
# Kinds that could block forever or fill the memory; run in processes with limits on both.
LARGE = [
    "fifo", "fifo for events", "endless device", "terminal", "frame of 3 GiB", "frame of 100 MB",
    "100 GiB of zeros", "array of 4 GB claimed", "object of 4 GB claimed", "list of 2 GB claimed",
    "begin of 2 GB claimed", "a million scalars", "300,000 modules",
    "event of 3 GiB", "100 GiB of zeros in events", "picture of 300 MB",
]  # fmt: skip
SMALL = [name for name in KINDS if name not in LARGE]
READ_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from tests.helpers.shell import call
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, 2 * [size + (2 << 30)])
done = [call(command, sys.argv[1]) for command in ("alerts", "explain", "report")]
assert [command.returncode for command in done] == [1, 0, 0], done
assert "step 7" in done[0].stdout
assert sys.argv[2] in done[2].stderr  # of the report, which reads everything
"""


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End a test that blocks forever."""
    monkeypatch.setenv("COLUMNS", "140")
    old = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("blocks"))
    signal.alarm(WATCHDOG_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


def about(kind: Kind, text: str) -> int:
    """Return the number of lines about what was skipped."""
    return len([line for line in text.splitlines() if kind.said in line]) if kind.said else 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SMALL)
def test_intact_data_is_read_and_shown_and_damage_is_reported_in_one_line(name: str) -> None:
    with hostile_run(name) as (log_dir, kind):
        view = ReadView(log_dir)
        assert view.layers == list(kind.layers)
        assert 7 in [step for step, _ in view.alerts]
        for statistic in ("grad_norm", "weight_norm"):
            assert view.matrix(statistic)[0] == list(range(STEPS))
        assert {0, 3} <= set(view.run.scalars.step)
        for layer in view.layers[:10]:
            assert view.run.units(layer).steps.size == 0
        read = about(kind, "\n".join(view.run.problems))
        report = log_dir.parent / "report.html"
        for command in COMMANDS:
            done = call(command, log_dir, *(["-o", report] if command == "report" else []))
            out, err = done.stdout, done.stderr
            assert done.returncode == (command == "alerts")
            assert all(c.isprintable() or c == "\n" for c in out + err)
            assert len(err.splitlines()) <= 51
            if command == "report":
                assert max(about(kind, err), read) == bool(kind.said), err
        assert SCRIPT not in report.read_text(encoding="utf-8")
        assert report.stat().st_size < 10_000_000


@pytest.mark.parametrize("name", LARGE)
def test_commands_read_large_untrusted_directories_in_little_memory(name: str) -> None:
    with hostile_run(name) as (log_dir, kind):
        run_script(log_dir.parent, READ_IN_LITTLE_MEMORY, log_dir, kind.said, cwd=log_dir.parent)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_a_file_without_permission_is_reported_in_one_line() -> None:
    rights = "-dac_override,-dac_read_search"  # without these not even root may
    prefix = ["setpriv", "--bounding-set", rights, "--inh-caps", rights] if not os.geteuid() else []
    with hostile_run("unreadable file") as (log_dir, _):
        (log_dir.parent / "closed").mkdir(mode=0)
        done = subprocess.run(
            [*prefix, sys.executable, "-m", "telemetry.commands.cli", "alerts", log_dir.parent],
            capture_output=True, text=True, timeout=WATCHDOG_S,
        )  # fmt: skip
    assert "step 7" in done.stdout
    assert done.stderr.count("Permission denied") == len(done.stderr.splitlines()) == 2


def test_a_directory_whose_name_is_not_valid_text_has_a_report(tmp_path: Path) -> None:
    log_dir = tmp_path / os.fsdecode(b"run-\xff")
    log_dir.mkdir()
    write_good_run(log_dir)
    assert call("report", log_dir, "-o", tmp_path / "report.html").returncode == 0
    assert "run-" in (tmp_path / "report.html").read_text(encoding="utf-8")
