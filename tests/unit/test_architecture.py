"""Imports go to lower layers, never in a circle; modules that read records load no torch.

Tests import what users import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PACKAGE = ROOT / "telemetry"

# Parts of the package (a module, a subpackage with all its files, or one file of a subpackage),
# from the lowest layer up.
LAYERS = [
    {"plain_text", "tables", "threads", "untrusted", "version"},
    {"tag_names"},
    {"failures", "records", "torch_private"},
    {"alert"},
    {"layers", "rule", "selection"},
    {"measure"},
    {"events", "ranks.role", "ranks.topology"},
    {"alerts", "capture", "flight", "reading", "writing"},
    {"interventions", "ranks"},
    {"pipeline"},
    {"run"},
    {"testing"},
    {"checking"},
    {"integrations"},
    {"tensorboard_plugin"},
    {"commands"},
    {"__main__"},
    {""},  # telemetry/__init__.py
]
LAYER_OF = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}

# Reading and drawing records must start quickly; importing torch takes seconds.
TORCH_FREE = {
    "alert", "alerts", "commands", "events", "failures", "flight", "layers", "plain_text",
    "reading", "records", "rule", "tables", "tag_names", "tensorboard_plugin", "threads",
    "untrusted", "version",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Module:
    name: str
    imports: frozenset[str]

    @property
    def part(self) -> str:
        return part(self.name)

    @property
    def is_torch_free(self) -> bool:
        return self.part in TORCH_FREE


def part(name: str) -> str:
    """Return the part in ``LAYERS`` of a dotted module name; a single file may be a part."""
    _, _, rest = name.partition(".")
    return rest if rest in LAYER_OF else rest.partition(".")[0]


def read_modules(package: Path) -> dict[str, Module]:
    """Return every module below ``package``, by dotted name."""
    paths = {}
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.pyi")]):
        parts = path.relative_to(package.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if path.stem == "__init__" else parts)] = path
    return {
        name: Module(name=name, imports=frozenset(read_imports(name, path, set(paths))))
        for name, path in paths.items()
    }


def read_imports(name: str, path: Path, known: set[str]) -> Iterator[str]:
    """Yield the absolute names of all imports of a module, also in functions and for types.

    ``from a import b`` is ``a.b`` where that is one of the ``known`` modules, else ``a``.
    """
    package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{source}.{alias.name}"
                yield full if full in known else source


def violations(package: Path) -> list[str]:
    modules = read_modules(package)
    unknown = [f"{name} has no layer" for name in modules if part(name) not in LAYER_OF]
    faults = [
        f"{module.name} imports {target}, {fault}"
        for module in modules.values()
        for target in sorted(module.imports)
        if (fault := find_fault(module, target, modules))
    ]
    return (
        unknown or faults or [f"{' and '.join(names)} are a circle" for names in circles(modules)]
    )


def circles(modules: dict[str, Module]) -> list[list[str]]:
    """Return groups of modules that import each other, directly or through others."""
    reached = {name: reachable(name, modules) for name in modules}
    groups = {
        tuple(sorted(other for other in others if name in reached[other]))
        for name, others in reached.items()
        if name in others
    }
    return [list(group) for group in sorted(groups)]


def reachable(name: str, modules: dict[str, Module]) -> set[str]:
    """Return all modules that this one imports, directly or through others."""
    found: set[str] = set()
    open_ends = [name]
    while open_ends:
        new = (modules[open_ends.pop()].imports & modules.keys()) - found
        found |= new
        open_ends += new
    return found


def find_fault(module: Module, target: str, modules: dict[str, Module]) -> str | None:
    if target.partition(".")[0] != PACKAGE.name:
        heavy = target.partition(".")[0] in {"torch", "torchvision"}
        return "but must do without torch" if heavy and module.is_torch_free else None
    if target not in modules:
        return "which does not exist"
    if part(target) != module.part and LAYER_OF[part(target)] >= LAYER_OF[module.part]:
        return "which is not in a lower layer"
    if module.is_torch_free and not modules[target].is_torch_free:
        return "which needs torch"
    return None


def test_modules_import_only_from_lower_layers_and_never_in_a_circle() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("path", "code", "fault"),
    [
        ("measure.py", "from telemetry.testing import HookLogger", "not in a lower layer"),
        ("measure.py", "from telemetry import testing", "not in a lower layer"),
        ("measure.py", "from . import testing", "not in a lower layer"),
        ("measure.py", "if TYPE_CHECKING:\n    from .testing import X", "not in a lower layer"),
        ("capture/__init__.py", "from ..testing import HookLogger", "not in a lower layer"),
        ("capture/__init__.py", "from ..selektion import x", "does not exist"),
        ("records/sketch.py", "import torch.nn as nn", "must do without torch"),
        ("reading/sources.py", "def f():\n    from torch import Tensor", "must do without torch"),
        ("reading/sources.py", "from telemetry.selection import x", "needs torch"),
        ("helpers.py", "", "has no layer"),
        ("capture/hooks.py", "from telemetry.capture.step import Step", "are a circle"),
        ("capture/hooks.py", "if TYPE_CHECKING:\n    from .step import Step", "are a circle"),
        ("capture/__init__.py", "from .modules import x\nfrom ..records.sketch import y", None),
        ("events/writer.py", "from telemetry.events import hooks\nimport numpy", None),
    ],
)
def test_each_rule_is_checked(tmp_path: Path, path: str, code: str, fault: str | None) -> None:
    package = tmp_path / "telemetry"
    for name in ["__init__", "testing", "selection", "records/sketch", "capture/__init__"]:
        write(package / f"{name}.py", "")
    for name in ["capture/hooks", "events/__init__", "events/hooks"]:
        write(package / f"{name}.py", "")
    write(package / "capture/__init__.py", "from telemetry.capture.modules import x")
    write(package / "capture/modules.py", "from telemetry.capture.step import x")
    write(package / "capture/step.py", "from telemetry.capture.hooks import x")
    write(package / path, code)
    found = violations(package)
    if fault is None:
        assert found == []
    else:
        assert len(found) == 1
        assert fault in found[0]


def write(path: Path, code: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code, encoding="utf-8")


def test_no_tuple_is_filled_by_a_generator() -> None:
    """A concurrent ``gc.get_objects()`` holds a reference to it, which raises ``SystemError``."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "tuple"
        and any(isinstance(argument, ast.GeneratorExp) for argument in node.args)
    ]
    assert found == []


# --- doors of the tests --------------------------------------------------------------------------

TESTS = ROOT / "tests"
PUBLIC = ("telemetry", "telemetry.testing", "telemetry.interventions", "telemetry.version")
MATHEMATICS = (
    "unit/layers/test_layers.py",
    "unit/layers/test_module_types.py",
    "unit/layers/test_onset.py",
    "unit/layers/test_units.py",
    "unit/measure/test_device.py",
    "unit/measure/test_images.py",
    "unit/measure/test_measure.py",
    "unit/measure/test_native.py",
    "unit/ranks/test_merging.py",
    "unit/reading/test_distributions.py",
    "unit/records/test_rows.py",
    "unit/records/test_sketch.py",
    "unit/test_plain_text.py",
    "unit/writing/test_histograms.py",
)
"""Tests of formulas, most of them against NumPy, by their paths in ``tests/``."""
PYTORCH = (
    "contract/capture/test_experts.py",
    "contract/capture/test_torch_private.py",
    "contract/tensorboard_plugin/test_agreement.py",
    "system/benchmarks/test_replay.py",
    "unit/capture/test_norms.py",
)
"""Tests of what PyTorch itself calls or hides: its private names, graphs, and missed steps."""


def internal_imports(path: Path, known: set[str]) -> list[str]:
    """Return the modules of the package that a test imports and users do not."""
    return sorted(
        name
        for name in read_imports("tests", path, known)
        if name.partition(".")[0] == PACKAGE.name
        and name not in PUBLIC
        and not name.startswith("telemetry.integrations")
    )


def test_only_helpers_mechanisms_and_named_files_import_what_is_internal() -> None:
    known = set(read_modules(PACKAGE))
    found = {
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("*.py")
        if path.relative_to(TESTS).parts[0] not in ("helpers", "mechanisms")
        and internal_imports(path, known)
    }
    assert found == {*MATHEMATICS, *PYTORCH}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import telemetry\nfrom telemetry import Alert\nfrom telemetry.testing import x", []),
        ("from telemetry.integrations.keras import x\nfrom telemetry import interventions", []),
        ("def f():\n    from telemetry import records", ["telemetry.records"]),
        ("from telemetry.records import StepRecord", ["telemetry.records"]),
        ("import telemetry.alerts.engine as x", ["telemetry.alerts.engine"]),
    ],
)
def test_an_internal_import_is_noticed(tmp_path: Path, code: str, found: list[str]) -> None:
    write(tmp_path / "test_x.py", code)
    assert internal_imports(tmp_path / "test_x.py", set(read_modules(PACKAGE))) == found


def test_tests_of_mechanisms_are_at_most_15_percent_of_all_lines() -> None:
    def lines(folder: Path) -> int:
        texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]
        return sum(text.count("\n") for text in texts)

    assert lines(TESTS / "mechanisms") <= 0.15 * lines(TESTS)
