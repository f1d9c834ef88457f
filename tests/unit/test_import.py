"""Importing telemetry is quick, and loads torch only when a name that needs it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import telemetry


def run_python(code: str) -> str:
    """Return the stdout of this code in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_import_loads_a_handful_of_modules() -> None:
    """Modules beyond those that any program loads."""
    code = "import importlib, sys, typing; before = {*sys.modules}; import telemetry; "
    assert int(run_python(code + "print(len({*sys.modules} - before))")) <= 10


@pytest.mark.slow
def test_lazily_loaded_modules_print_no_warning() -> None:
    code = "import telemetry; [getattr(telemetry, name) for name in telemetry.__all__]"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("imports", "heavy"),
    [
        ("import telemetry", ["torch", "numpy"]),
        ("from telemetry import Alert", ["torch"]),
        (
            "import telemetry.events.files, telemetry.events.reading",
            ["torch", "grpc", "werkzeug", "fsspec", "tensorboard.backend"],
        ),
    ],
)
def test_imports_do_not_load_heavy_packages(imports: str, heavy: list[str]) -> None:
    assert run_python(f"{imports}; import sys; print({{*{heavy}}} & {{*sys.modules}})") == "set()"


@pytest.mark.parametrize("name", sorted({*telemetry.__all__} - {"__version__", "native"}))
def test_public_names_are_importable_and_listed(name: str) -> None:
    assert getattr(telemetry, name).__name__ == name
    assert name in dir(telemetry)


def test_names_of_the_stub_alone_are_listed() -> None:
    stub = ast.parse(Path(telemetry.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    names = [alias.asname for node in imports for alias in node.names]
    assert dir(telemetry) == telemetry.__all__ == sorted(names)


def test_an_error_inside_an_import_is_reported(tmp_path: Path) -> None:
    """Python treats an AttributeError as a missing name."""
    (tmp_path / "torch.py").write_text("import sys\nsys.no_such_thing\n")  # a broken install
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from telemetry import HookLogger"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "cannot import name" not in done.stderr
    assert done.stderr.endswith("has no attribute 'no_such_thing'\n")
    assert "The above exception was the direct cause" in done.stderr


def test_unknown_names_raise_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'HokLogger'"):
        _ = telemetry.HokLogger


@pytest.mark.slow
def test_the_measuring_backend_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import telemetry; print(telemetry.native)"
    monkeypatch.setenv("TELEMETRY_NATIVE", "0")
    assert run_python(code) == "NumPy, because TELEMETRY_NATIVE is 0"
    monkeypatch.delenv("TELEMETRY_NATIVE")
    assert run_python(code).startswith(("C extension", "NumPy, because the C"))


@pytest.mark.slow
def test_a_missing_extension_is_logged_once_with_its_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TELEMETRY_NATIVE", raising=False)
    code = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
sys.modules["telemetry.measure._native"] = None
import telemetry, telemetry.measure
assert telemetry.native == "NumPy, because the C extension cannot be loaded: it was not built"
"""
    output = run_python(code)
    assert output.count("times as long") == 1
    assert output.startswith("WARNING:telemetry:")
    assert "circular" not in output
