"""The example trains, prints a summary, and reports its planted faults."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import train_mnist
from tests.helpers.loops import load
from tests.helpers.paths import ROOT
from tests.helpers.shell import run as command


@pytest.fixture(autouse=True)
def _restore_socket_timeout() -> Iterator[None]:
    timeout = socket.getdefaulttimeout()
    yield
    socket.setdefaulttimeout(timeout)


@pytest.fixture
def no_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every download fail."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz:\nTried https://...")

    monkeypatch.setattr(train_mnist, "MNIST", fail)


def run(capsys: pytest.CaptureFixture[str], log_dir: Path, *arguments: str) -> str:
    """Return the output of the example, with its log in ``log_dir``."""
    train_mnist.main(["--log-dir", str(log_dir), "--device", "cpu", *arguments])
    return capsys.readouterr().out


def test_mnist_is_learned_and_raises_no_alert(
    mnist_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    printed = run(capsys, tmp_path, "--data", str(mnist_dir), "--epochs", "2")
    assert caplog.messages == []
    accuracy = re.search(r"test accuracy +([\d.]+)%", printed)
    assert accuracy is not None
    assert float(accuracy[1]) >= 95
    assert re.search(r"alerts +none", printed)
    assert f"tensorboard --logdir {tmp_path.parent} --port 6006\n" in printed
    assert printed.endswith(f"/#telemetry&p.telemetry.run={tmp_path.name}\n")

    events = load(tmp_path)
    assert [event.step for event in events.Scalars("loss")] == list(range(250))
    assert [event.step for event in events.Scalars("test_accuracy")] == [125, 250]
    assert {"activation/0000.conv1", "weight/0000.conv1.weight"} <= set(events.Tags()["tensors"])


@pytest.mark.usefixtures("no_mnist")
def test_without_mnist_the_example_trains_on_digits_and_raises_no_alert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train_mnist.main(["--epochs", "2"])
    printed = capsys.readouterr().out
    assert printed.startswith(
        "No MNIST (Error downloading train-images-idx3-ubyte.gz); training on"
    )
    assert re.search(r"alerts +none", printed)
    [log_dir] = tmp_path.glob("runs/*")
    assert re.fullmatch(r"digits-\d{8}-\d{6}", log_dir.name)
    shown = load(log_dir).SummaryMetadata("_hparams_/session_start_info")
    assert all(name in shown.plugin_data.content for name in (b"digits", b"fault", b"batch_size"))


@pytest.mark.usefixtures("no_mnist")
def test_the_readme_shows_what_its_commands_print(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to numbers, which depend on the machine, and the lengths of curves."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```", readme, re.S | re.M)
    logged, explained = (
        blocks[blocks.index(f"{above}\n") + 1]
        for above in ("python train_mnist.py --fault exploding", "telemetry explain runs/")
    )
    monkeypatch.chdir(tmp_path)
    train_mnist.main(["--fault", "exploding", "--epochs", "1"])
    capsys.readouterr()
    assert command("explain", "runs/") == 0
    shown = {*map(masked, capsys.readouterr().out.splitlines())}
    assert [line for line in explained.splitlines() if masked(line) not in shown] == []
    messages = [*map(masked, caplog.messages)]
    assert [part for part in re.split(r"\n(?=\S)", logged) if masked(part) not in messages] == []


def masked(text: str) -> str:
    """Return words and places of numbers, whatever the line breaks and the lengths of curves."""
    text = re.sub(r"[▁-█!]+", "~", text)
    return " ".join(re.sub(r"[\d.,]*\d(e[+-]?\d+)?|\bnan\b| –(?= )|–$", " # ", text).split())


@pytest.mark.usefixtures("no_mnist")
@pytest.mark.parametrize(
    ("fault", "seed", "alert"),
    [
        ("exploding", "0", r"exploding_gradient in hidden\.\d+ at step 0"),
        ("vanishing", "1", r"vanishing_gradient in conv1 at step \d"),
        ("nonfinite", "0", r"nonfinite in conv1 at step 10"),
        ("dead", "1", r"dead_units in hidden\.0 at step \d"),
        ("saturated", "0", r"saturated_units in hidden\.1 at step \d"),
        ("lr_too_high", "1", r"loss_divergence at step \d"),
        ("lr_too_low", "0", r"no_learning at step \d+"),
    ],
)
def test_each_fault_is_found_in_its_layer(
    fault: str, alert: str, seed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--fault", fault, "--seed", seed, "--every-n-steps", "10", "--epochs", "2"]
    printed = run(capsys, tmp_path, *options)
    # A failing run may show a second fault; the first alert is the planted one.
    assert re.search(rf"alerts +\d+\n  {alert}", printed)
