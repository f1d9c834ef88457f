"""The command with real runs, processes, pipes, terminals and many runs at once."""

from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from telemetry import HookLogger
from telemetry.version import __version__
from tests.helpers.known_runs import alert_at, layout_of, write_dashboards, write_run
from tests.helpers.shell import call, lines, parsed, records, table
from tests.helpers.small_runs import fit, rate_of

CLI = [sys.executable, "-m", "telemetry.commands.cli"]
STRANGE = ["a b", "注意力", "[red]x", "=1+1", "x" * 300, "new\nline", "\x1b[2J", "-rf", '"', "½"]
RUN_NAMES = ["run 10", "run 9", "-dash", "100%", "new\nline", "[bold]", os.fsdecode(b"\xff"), "注"]


def train(
    log_dir: Path, *, names: list[str] | None = None, lr: float = 0.1, nan_at: int | None = None,
    steps: int = 12, jump_at: float = math.inf,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    layers = OrderedDict((name, nn.Linear(4, 4)) for name in names or ["first", "second", "last"])
    model = nn.Sequential(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(8, 4) * (torch.nan if step == nan_at else 1)
        return model(inputs).square().mean()

    rate = rate_of(optimizer, lambda step: lr if step < jump_at else 2 * lr)
    with HookLogger(model, log_dir, every_n_steps=4, measure="!images") as logger:
        fit(logger, steps, loss_of, optimizer, before=rate)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a good run, one of the same, one with another learning rate, and a bad one."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "good")
    train(folder / "same")
    train(folder / "faster", lr=0.2)
    train(folder / "deep" / "bad", nan_at=5)
    return folder


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strange")
    for name in RUN_NAMES:
        train(folder / name, names=STRANGE, steps=2)
    return folder


def environment(**changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "NO_COLOR", "FORCE_COLOR"}}
    return {**kept, **changes}


def process(*arguments: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *arguments], env=environment(PYTHONWARNINGS="error", **changes),
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip


def in_terminal(width: int, *arguments: str | Path, status: int = 0) -> str:
    """Return the output on a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    env, sent = environment(TERM="xterm", NO_COLOR="1"), b""
    with subprocess.Popen(
        [*CLI, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    ) as process:
        os.close(theirs)
        with suppress(OSError):  # Linux: the other end is closed
            while piece := os.read(ours, 1 << 16):
                sent += piece
    os.close(ours)
    assert process.returncode == status
    return re.sub(r"\x1b\[[\d;]*m", "", sent.decode().replace("\r\n", "\n"))


# --- several runs ------------------------------------------------------------------------------


def test_a_directory_of_runs_is_searched_to_any_depth(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    done = call("alerts", ".")
    heads = [line.partition(": ")[0] for line in done.stdout.splitlines() if ": " in line[:12]]
    assert done.returncode == 1
    assert sorted(set(heads)) == ["deep/bad", "faster", "good", "same"]
    assert "good: no alerts" in done.stdout
    assert "deep/bad: error: nonfinite" in done.stdout
    assert done.stderr == ""


def test_a_run_that_is_given_twice_or_linked_is_shown_once(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(runs / "good", target_is_directory=True)
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    found = records("summary", tmp_path, tmp_path)
    assert {record["run"] for record in found} == {str(tmp_path / "link")}
    assert len(found) == 3


def test_unreadable_data_is_an_error_and_the_rest_is_shown(runs: Path, tmp_path: Path) -> None:
    write_dashboards(tmp_path / "others", scalars={"loss": {0: 1.0}})
    done = call("alerts", tmp_path / "nothing", runs / "good", tmp_path)
    assert done.returncode == 2
    assert "no such directory" in done.stderr
    assert "no alerts" in done.stdout
    for command in ("explain", "summary", "alerts", "runs"):
        for path in (tmp_path, tmp_path / "others"):
            done = call(command, path)
            assert (done.returncode, done.stdout) == (2, "")
            assert f"{tmp_path}/others: no run log" in done.stderr
    (tmp_path / "empty").mkdir()
    for command in ("summary", "alerts", "report"):
        done = call(command, tmp_path / "empty")
        assert (done.returncode, "neither a run log nor event files" in done.stderr) == (2, True)
    done = call("explain", "/dev/zero")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "no such directory" in done.stderr
    [file] = (runs / "good").glob("events*")
    done = call("summary", file)
    assert done.returncode == 2
    assert f"give the directory of the run: {runs / 'good'}" in done.stderr


def test_runs_without_a_step_and_those_of_other_programs_are_skipped_in_one_line(
    runs: Path, tmp_path: Path
) -> None:
    model = nn.Linear(2, 1)
    loggers = [HookLogger(model, tmp_path / name) for name in ("a", "b")]
    write_dashboards(tmp_path / "c", scalars={"loss": {0: 1.0}})
    (tmp_path / "good").symlink_to(runs / "good", target_is_directory=True)
    done = call("alerts", tmp_path)
    [line] = done.stderr.splitlines()
    names = ", ".join(str(tmp_path / name) for name in "abc")
    assert line.startswith(f"telemetry: skipped {names}: no run log")
    assert "no step is recorded yet" in call("summary", tmp_path / "a").stderr
    for logger in loggers:
        logger.close()
    assert [path.name for path in tmp_path.glob("[ab]/*")] == []


# --- terminals and pipes -----------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 12, 30, 80])
def test_the_summary_keeps_the_layers_in_a_terminal_of_any_width(runs: Path, width: int) -> None:
    shown = in_terminal(width, "summary", runs / "good")
    body = shown.partition("Gradient norm\n")[2]
    assert max(map(len, body.splitlines())) <= max(width, 6)
    for name in ("first", "second", "last"):
        assert name in (body if width >= 6 else body.replace("\n", ""))
    assert ("Linear" in body) == (width >= 80)
    assert ("  last" in body) == (width >= 30)


@pytest.mark.parametrize("width", [50, 80, 120])
def test_columns_of_runs_are_shown_or_named(runs: Path, width: int) -> None:
    shown = in_terminal(width, "runs", runs)
    assert max(map(len, shown.splitlines())) <= width
    assert "nonfinite, step 5" in shown  # what matters most
    for title in ("started", "last step", "best loss", "worst alert"):
        assert title in shown
    assert ("no room for" in shown) == (width < 120)


def test_a_difference_is_shown_with_both_values_on_a_narrow_terminal(runs: Path) -> None:
    shown = in_terminal(40, "diff", runs / "good", runs / "faster", status=1)
    *rows, hidden = shown.partition("first difference")[2].splitlines()
    assert max(map(len, rows)) <= 40
    assert ["learning_rate/0", "0", "0.1", "0.2"] in [row.split() for row in rows]
    assert hidden == "no room for: layers"


@pytest.mark.parametrize("width", [60, 80])
def test_an_explanation_fits_the_terminal(runs: Path, width: int) -> None:
    shown = in_terminal(width, "explain", runs / "deep" / "bad")
    assert max(map(len, shown.splitlines())) <= width
    explanation = " ".join(shown.split())
    for said in ("By depth, before", "output rms", "gradient norm", "nonfinite at step 5"):
        assert said in explanation


def test_long_names_continue_on_the_next_line_and_are_whole_in_a_pipe(strange: Path) -> None:
    shown = in_terminal(60, "summary", strange / "run 9")
    assert max(map(len, shown.splitlines())) <= 60
    assert shown.count("x") >= 300
    for columns in ("20", "500"):
        done = process("summary", strange / "run 9", COLUMNS=columns)
        [line] = [line for line in done.stdout.splitlines() if line.startswith("x" * 300)]
        assert "Linear" in line
    done = process("summary", strange / "run 9", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "\\u6ce8" in done.stdout, "characters that the terminal lacks are escaped"


def test_control_characters_never_reach_the_terminal(strange: Path) -> None:
    for arguments in (["summary"], ["alerts"], ["explain"], ["summary", "--csv"]):
        done = call(*arguments, strange)
        assert "\x1b" not in done.stdout + done.stderr
        assert done.returncode == (2 if arguments == ["explain"] else 0), done.stderr
    shown = call("summary", strange).stdout
    assert "\\x1b[2J" in shown
    assert "[red]x" in shown, "names are no markup"
    assert "[bold]: 10 layers" in shown


def test_a_closed_pipe_is_not_an_error(runs: Path) -> None:
    for arguments in (f"summary {runs} --csv", f"summary {runs} --json", f"summary {runs}"):
        command = f"{' '.join(CLI)} {arguments} | head -1"
        done = subprocess.run(command, shell=True, env=environment(), capture_output=True)
        assert done.stdout.count(b"\n") == 1
        assert done.stderr == b""
    read, write = os.pipe()
    os.close(read)
    command = [*CLI, "summary", str(runs)]
    with subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, env=environment()) as done:
        os.close(write)
        assert done.communicate()[1] == b""


def test_alerts_are_printed_as_they_come_also_of_a_resumed_run(tmp_path: Path) -> None:
    def part(steps: Sequence[int], alert_step: int) -> None:
        write_run(
            tmp_path, layout_of(["first"]), steps=steps, norms=lambda _: np.ones(1, np.float32),
            alerts=[alert_at(alert_step, "first")],
        )  # fmt: skip

    def step_of_next_line() -> int:
        step: int = json.loads(process.stdout.readline())["step"]  # type: ignore[union-attr]
        return step

    part(range(6), 4)
    command = [*CLI, "alerts", "--json", "--follow", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as process:
        assert step_of_next_line() == 4
        part(range(2, 9), 8)  # it hides the first alert
        assert step_of_next_line() == 8
        process.send_signal(signal.SIGINT)
        assert process.communicate() == (b"", None)
    assert process.returncode == 0


# --- records -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["summary", "alerts", "explain"])
def test_json_and_csv_contain_the_same_runs(
    runs: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    status = command == "alerts"
    rows = table("\n".join(lines(command, ".", "--csv", status=status)))
    found = {record["run"] for record in records(command, ".", status=status)}
    assert found == {row["run"] for row in rows} != set()
    assert call(command, runs, "--json", "--csv").returncode == 2


def test_json_and_csv_contain_unprintable_names_unchanged(strange: Path) -> None:
    found = parsed(process("summary", strange, "--json").stdout)
    assert {record["module_name"] for record in found} == set(STRANGE)
    assert {record["run"] for record in found} == {str(strange / name) for name in RUN_NAMES}
    rows = table(process("summary", strange, "--csv").stdout)
    assert len(rows) == len(found) == len(STRANGE) * len(RUN_NAMES)


def test_records_are_complete_and_nan_is_text_in_json(runs: Path) -> None:
    [alert] = records("alerts", runs / "deep", status=1)
    assert alert["kind"] == "nonfinite"
    assert [record["last"] for record in records("summary", runs / "deep")] == ["nan"] * 3
    assert call("alerts", runs / "good", "--json").stdout == "[]\n"
    assert table(call("explain", runs / "good", "--csv").stdout) == []
    [fault] = records("explain", runs / "deep")
    assert fault["alerts"][0]["kind"] == "nonfinite"
    rows = table(call("explain", fault["run"], "--csv").stdout)
    assert [row["module_name"] for row in rows] == fault["modules"]["name"] * len(fault["profiles"])


# --- diff --------------------------------------------------------------------------------------


def test_the_first_step_and_layer_where_runs_diverge_are_named(runs: Path) -> None:
    assert records("diff", runs / "good", runs / "same") == []
    done = call("diff", runs / "good", runs / "deep" / "bad")
    assert done.returncode == 1
    assert "diverge at step 5 in loss, the layers at step 5 in layer last" in done.stdout
    found = records("diff", runs / "good", runs / "faster", status=1)
    assert [(d["statistic"], d["step"]) for d in found[:3]] == [
        ("learning_rate/0", 0), ("update_ratio", 0), ("loss", 1),
    ]  # fmt: skip
    forward = next(d for d in found if d["statistic"] == "activation_rms")
    assert (forward["step"], forward["module_name"], forward["layer_count"]) == (4, "first", 3)
    backward = next(d for d in found if d["statistic"] == "grad_norm")
    assert (backward["step"], backward["module_name"]) == (1, "last")


def test_a_rate_that_changes_between_full_steps_differs_first(runs: Path, tmp_path: Path) -> None:
    train(tmp_path, jump_at=6)
    found = records("diff", runs / "good", tmp_path, status=1)
    assert [(d["statistic"], d["step"]) for d in found[:2]] == [
        ("learning_rate/0", 6), ("loss", 7),
    ]  # fmt: skip


def test_values_that_differ_in_late_digits_are_shown_with_them(runs: Path, tmp_path: Path) -> None:
    train(tmp_path, lr=0.100001)
    done = call("diff", runs / "good", tmp_path)
    assert call("diff", runs / "good", tmp_path, "--tolerance", "1").returncode == 0
    rates = next(line for line in done.stdout.splitlines() if line.startswith("learning_rate"))
    assert rates.split()[1:] == ["0", "0.1", "0.100001"]


def test_runs_without_anything_in_common_are_an_error(runs: Path, tmp_path: Path) -> None:
    train(tmp_path, names=["other"], steps=2)
    done = call("diff", runs / "good", tmp_path)
    assert done.returncode == 2
    assert "no layer or no step in common" in done.stderr
    assert call("diff", runs, runs).returncode == 2


# --- help, completion ------------------------------------------------------------------


def test_commands_show_a_run_that_has_an_alert_and_no_step(tmp_path: Path) -> None:
    log_dir, model = tmp_path / "run", nn.Linear(2, 1)
    with HookLogger(model, log_dir) as logger:
        for _ in range(100):
            logger.log(loss=0.5)
    report = tmp_path / "report.html"
    for status, *arguments in (
        (0, "summary", log_dir), (1, "alerts", log_dir),
        (0, "runs", log_dir), (0, "report", log_dir, "-o", report),
    ):  # fmt: skip
        done = call(*arguments)
        assert (done.returncode, done.stderr) == (status, ""), arguments
        assert done.stdout
    [alert] = records("alerts", log_dir, status=1)
    assert (alert["kind"], alert["step"], alert["module_name"]) == ("no_learning", 0, None)
    assert records("summary", log_dir) == []
    assert "no steps, 1 alert" in report.read_text(encoding="utf-8")
    for arguments in (("diff", log_dir, log_dir), ("explain", log_dir)):
        done = call(*arguments)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_commands_do_not_load_torch(runs: Path) -> None:
    code = """
import sys
from telemetry.commands.cli import main
for command in ("summary", "alerts", "explain", "lint"):
    main([command, sys.argv[1]])
    print("loaded after", command, {"torch", "tensorflow"} & set(sys.modules))
"""
    arguments = [sys.executable, "-W", "error", "-c", code, str(runs / "deep" / "bad")]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, check=True)
    assert "nonfinite" in done.stdout
    assert re.findall(r"loaded after \w+ (.*)", done.stdout) == ["set()"] * 4


@pytest.mark.parametrize("command", ["summary", "alerts", "explain", "diff", "report"])
def test_the_help_explains_each_argument_and_has_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = call(command, "--help").stdout
    assert f"example:\n  telemetry {command} runs/" in text
    assert "directory of a run" in text
    assert command in call("--help").stdout
    alone = call()
    assert (alone.returncode, f"\n    {command} " in alone.stdout) == (2, True)
    assert call("--version").stdout == f"telemetry {__version__}\n"


def test_the_shell_completes_commands_options_and_statistics(tmp_path: Path) -> None:
    def completed(line: str) -> set[str]:
        answer = tmp_path / "answer"
        env = environment(
            _ARGCOMPLETE="1", COMP_LINE=line, COMP_POINT=str(len(line)), _ARGCOMPLETE_IFS="\n",
            _ARGCOMPLETE_STDOUT_FILENAME=str(answer), _ARGCOMPLETE_COMP_WORDBREAKS=" ",
        )  # fmt: skip
        code = "from telemetry.commands.cli import main; main()"
        subprocess.run([sys.executable, "-c", code], env=env, check=True)
        return {word.strip() for word in answer.read_text().split("\n")}

    assert completed("telemetry ex") == {"explain"}
    assert "--statistic" in completed("telemetry summary --")
    assert completed("telemetry summary --statistic dead_u") == {"dead_units"}
