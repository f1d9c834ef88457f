"""Code of the docs that sends alerts and runs to other programs, run with local servers."""

from __future__ import annotations

import json
import re
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.scripts import run_script

PAGE = (ROOT / "docs" / "howto" / "notifications.md").read_text(encoding="utf-8")


CODE = {
    section.partition("\n")[0]: "".join(re.findall(r"^```python\n(.*?)^```", section, re.S | re.M))
    for section in PAGE.split("\n## ")
}
INTRODUCTION = CODE["# Send alerts and runs elsewhere"]


@contextmanager
def serving(server: socketserver.TCPServer) -> Iterator[str]:
    """Serve requests; yield the server's address."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_alerts_arrive_in_slack_and_by_mail_without_blocking_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[dict[str, str]] = []
    mailed: list[bytes] = []
    trained = threading.Event()

    class Slack(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert trained.wait(300), "training has waited for this answer"
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class Mail(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            while line := self.rfile.readline():
                if line.upper().startswith(b"DATA"):
                    self.wfile.write(b"354 go on\r\n")
                    mailed.append(b"".join(iter(self.rfile.readline, b".\r\n")))
                self.wfile.write(
                    b"221 bye\r\n" if line.upper().startswith(b"QUIT") else b"250 ok\r\n"
                )

    training = CODE["In the training"] + "    trained.set()\n"  # still in the logger's block
    names: dict[str, Any] = {"trained": trained}
    monkeypatch.chdir(tmp_path)
    servers = HTTPServer(("127.0.0.1", 0), Slack), socketserver.TCPServer(("127.0.0.1", 0), Mail)
    with serving(servers[0]) as slack, serving(servers[1]) as mail:
        monkeypatch.setenv("SLACK_WEBHOOK_URL", f"http://{slack}/services/x")
        monkeypatch.setenv("SMTP_SERVER", mail)
        monkeypatch.setenv("MAIL_TO", "me@example.com")
        exec(INTRODUCTION + CODE["Slack"] + CODE["E-mail"] + training, names)
    [alert] = [a for a in names["logger"].alerts if a.severity != "note"]
    assert [message["text"].split("\n")[0] for message in posted] == [f"*{alert.title}*"]
    [message] = map(message_from_bytes, mailed)
    assert message["Subject"] == f"error: {alert.title}"
    assert message.get_payload(decode=True).decode().splitlines() == alert.message.splitlines()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the page's training, which sends nothing."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(INTRODUCTION + CODE["In the training"].replace(", on_alert=notify", ""), {})
    return folder


def run_section(name: str, folder: Path, **env: str) -> None:
    paths = {"PYTHONPATH": str(ROOT), "HOME": str(folder), "PATH": "/usr/bin:/bin"}
    run_script(folder, f"import telemetry\n{CODE[name]}", cwd=folder, env=paths | env)


def in_wandb(name: str, folder: Path) -> bytes:
    """Run a section; return what wandb has recorded."""
    run_section(name, folder, WANDB_MODE="offline", WANDB_SILENT="true")
    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    return file.read_bytes()


def test_wandb_follows_the_curves_while_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "Weights & Biases, while it trains"
    code = INTRODUCTION + CODE["In the training"].replace(", on_alert=notify", "") + CODE[name]
    monkeypatch.setitem(CODE, name, code)
    assert b"~run/grad_norm/total" in in_wandb(name, tmp_path)


def test_a_run_is_logged_to_wandb(trained: Path) -> None:
    content = in_wandb("Weights & Biases, afterwards", trained)
    assert b"nonfinite" in content
    assert b"grad_norm/total" in content
    assert b"width" in content


def test_a_run_is_logged_to_mlflow(trained: Path) -> None:
    # A data base as MLflow recommends it needs more packages than its small distribution has.
    uri = (trained / "mlruns").as_uri()
    run_section("MLflow", trained, MLFLOW_TRACKING_URI=uri, MLFLOW_ALLOW_FILE_STORE="true")
    [loss] = trained.glob("mlruns/*/*/metrics/loss")
    rows = [line.split() for line in loss.read_text().splitlines()]
    assert [int(step) for _, _, step in rows] == list(range(20))
    assert float(rows[0][1]) > 0
    assert next(trained.glob("mlruns/*/*/params/lr")).read_text() == "0.05"
    assert next(trained.glob("mlruns/*/*/tags/first_alert")).read_text().startswith("nonfinite")
    [texts] = trained.glob("mlruns/*/*/artifacts/alerts.txt")
    assert texts.read_text().startswith("nonfinite")
