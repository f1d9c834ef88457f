"""List of the public API: each name, its arguments with their defaults, its attributes.

``python -m tests.helpers.public_api`` writes the committed list again.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from telemetry import integrations
from telemetry.alerts.configuration import DETECTORS

COMMITTED = Path(__file__).parents[1] / "unit" / "public_api.txt"
MODULES = ("telemetry", "telemetry.interventions", "telemetry.testing")


def lines() -> Iterator[str]:
    """Yield one line per public name, in alphabetical order within each module."""
    yield "# Members of Baseline, Layout and StepRecord that docs/ does not describe may change."
    for module_name in MODULES:
        module = import_module(module_name)
        for name in sorted(module.__all__):
            yield from _of_object(f"{module_name}.{name}", getattr(module, name))
    for path in sorted(Path(integrations.__path__[0]).glob("*.py")):  # each imports its framework
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Telemetry"):
                yield f"telemetry.integrations.{path.stem}.{node.name}"
    for kind, detector in sorted(DETECTORS.items()):
        limits = [f"{name}={getattr(detector, name)}" for name in detector.limits()]
        yield f"alert {kind}: {', '.join(limits)}"


def _of_object(name: str, value: object) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"{name}{_signature(value)}"
        fields = [*getattr(value, "__dataclass_fields__", ()), *getattr(value, "_fields", ())]
        own = set(_set_at_first(value))
        for attribute in sorted(
            {*dir(value), *fields, *getattr(value, "__annotations__", ()), *own}
        ):
            if not attribute.startswith("_") and (attribute in own or _is_ours(value, attribute)):
                member = getattr(value, attribute, None)
                is_method = inspect.isfunction(member) or inspect.ismethod(member)
                arguments = _signature(member) if is_method else ""
                yield f"{name}.{attribute}{arguments}"
    elif inspect.isroutine(value):
        yield f"{name}{_signature(value)}"
    else:
        yield name


def _set_at_first(value: type) -> Iterator[str]:
    """Yield the attributes that ``__init__`` sets, if it is written in the class."""
    init = vars(value).get("__init__")
    if not inspect.isfunction(init) or hasattr(value, "__dataclass_fields__"):
        return
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(init)))):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _signature(value: Callable[..., object]) -> str:
    """Return the arguments of a callable with their defaults, without types."""
    signature = inspect.signature(value)
    untyped = [
        each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()
    ]
    return str(inspect.Signature(untyped))


def _is_ours(owner: type, attribute: str) -> bool:
    """Whether one of the classes of this project defines the attribute."""
    return any(
        cls.__module__.startswith("telemetry.")
        and (attribute in vars(cls) or attribute in vars(cls).get("__annotations__", ()))
        for cls in owner.__mro__
    )


if __name__ == "__main__":
    COMMITTED.write_text("\n".join(lines()) + "\n", encoding="utf-8")
