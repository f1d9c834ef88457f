"""Each recipe of the docs runs, on its own, and prints what it says it prints."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, TCPServer
from threading import Thread

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
INTRODUCTION, *SECTIONS = PAGE.split("\n## ")


def code_in(text: str) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="module")
def received() -> Iterator[list[str]]:
    """What a web hook and a mail server, whose addresses are in the environment, were sent."""
    texts: list[str] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            texts.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    class Mail(StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            for line in self.rfile:
                texts.append(line.decode())
                code = b"354" if line == b"data\r\n" else b"250"
                if line == b"data\r\n" or line == b".\r\n" or not self._is_text:
                    self.wfile.write(code + b" ok\r\n")
                self._is_text = line == b"data\r\n" or (self._is_text and line != b".\r\n")

        _is_text = False

    servers = [ThreadingHTTPServer(("localhost", 0), Hook), TCPServer(("localhost", 0), Mail)]
    hook, mail = (server.server_address[1] for server in servers)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SLACK_WEBHOOK_URL", f"http://localhost:{hook}/")
        environment.setenv("SMTP_SERVER", f"localhost:{mail}")
        environment.setenv("MLFLOW_TRACKING_URI", "mlruns")
        environment.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        for server in servers:
            Thread(target=server.serve_forever, daemon=True).start()
        yield texts
        for server in servers:
            server.shutdown()
            server.server_close()


RECIPES = {section.partition("\n")[0]: code for section in SECTIONS if (code := code_in(section))}
BUILDS_ON = {"Test a rule": "Write a rule"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_does_what_it_says(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    received: list[str],
) -> None:
    received.clear()
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "recipe"}
    exec(code_in(INTRODUCTION), names)
    if name in BUILDS_ON:
        exec(RECIPES[BUILDS_ON[name]], names)
        capsys.readouterr()
    exec(textwrap.dedent(RECIPES[name]), names)
    expected = re.findall(r"^ *print\(.*\)  # (.*)$", RECIPES[name], re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == expected
    sends = "SLACK" in RECIPES[name] or "SMTP" in RECIPES[name]
    assert ("nonfinite" in "".join(received)) == sends
    assert list(Path("runs").glob("*/events.*")) or "capture_run" in RECIPES[name]
