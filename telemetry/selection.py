"""Selects modules and parameters of a model."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TypeAlias, TypeVar

from torch import nn

from telemetry.plain_text import closest, type_of
from telemetry.records.step import is_inside

T = TypeVar("T")
Predicate: TypeAlias = Callable[[str, nn.Module], bool]
Selector: TypeAlias = str | type[nn.Module] | Predicate
Selectors: TypeAlias = Selector | Iterable[Selector]

# Attributes of the wrapped module: torch.compile, FSDP1, activation checkpointing.
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# That of DistributedDataParallel and DataParallel; only at the root, as users like this name.
_WRAPPED_ROOT = "module"
# torch.nn.utils.parametrize adds this child to a module, which stays a leaf to its user.
_PARAMETRIZATIONS = "parametrizations"
# The class of nn.MultiheadAttention.out_proj, whose forward is never called.
_PART_OF_ATTENTION = nn.modules.linear.NonDynamicallyQuantizableLinear


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Selection of the modules to watch, for any model.

    Parameters inside of a watched module are recorded, those inside of an excluded one are not. If
    such modules contain each other, the innermost decides.
    """

    # A module is watched if one of these is true for it; None: if it is a leaf.
    modules: tuple[Predicate, ...] | None = None
    exclude: tuple[_Glob, ...] = ()  # it is not watched if one of these is true for it

    @staticmethod
    def parse(given: Selectors | None, argument: str = "HookLogger(modules") -> Selection:
        """Return a selection from selectors; raise TypeError for others, about ``argument``.

        A selector is a glob over the names in ``named_modules()`` (case-sensitive, ``*`` matches
        dots, parts that wrappers add may be left out), a module class, or a predicate. A glob after
        ``!`` excludes modules; if all do, it is from the leaves.
        """
        if given is None:
            return Selection()
        if isinstance(given, (str, type)) or not isinstance(given, Iterable):
            given = (given,)
        predicates = [_to_predicate(argument, item) for item in given]
        exclude = tuple([p for p in predicates if isinstance(p, _Glob) and p.excludes])
        modules = tuple([p for p in predicates if p not in exclude])
        return Selection(modules=modules if modules or not exclude else None, exclude=exclude)

    def apply(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the watched modules of ``model``, in the order of ``named_modules()``.

        A module with several names appears once, under the first. The model has the name "".
        Wrapped modules are watched, wrappers are not.
        """
        wanted = (_is_leaf,) if self.modules is None else self.modules
        return {
            name: module
            for name, module in _candidates(model).items()
            if any(matches(name, module) for matches in wanted)
            and not any(matches(name, module) for matches in self.exclude)
        }

    def callers(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return modules whose own calls of functions are measured: by ``modules``, else all."""
        every = (lambda name, module: True,)
        return replace(self, modules=self.modules or every).apply(model)

    def parameters(self, model: nn.Module) -> set[int]:
        """Return the identities of the parameters of ``model`` to record."""
        found = set(map(id, model.parameters())) if self.modules is None else set()
        if self.modules is None and not self.exclude:
            return found
        watched = self.apply(model)
        for name, module in _candidates(model).items():  # from the outside to the inside
            if name in watched:
                found.update(map(id, module.parameters()))
            elif any(matches(name, module) for matches in self.exclude):
                found.difference_update(map(id, module.parameters()))
        return found

    def check(self, model: nn.Module, argument: str = "HookLogger(modules") -> None:
        """Raise ValueError if a glob matches no module of this model, or no module is selected."""
        candidates = _candidates(model)
        for glob in (*(self.modules or ()), *self.exclude):
            if isinstance(glob, _Glob) and not any(map(glob.matches, candidates)):
                raise ValueError(_explain_no_match(argument, glob, candidates))
        if self != Selection() and not self.apply(model):
            raise ValueError(f"{argument}=...): selects none of the {_count(candidates)}")


def select_modules(
    model: nn.Module, select: Selectors | None, *, caller: str
) -> dict[str, nn.Module]:
    """Return modules by clean name, as ``HookLogger(modules=...)`` selects them for ``caller``."""
    check_model(model, caller)
    selection = Selection.parse(_is_leaf if select is None else select, f"{caller}(select")
    selection.check(model, f"{caller}(select")
    return cleaned(selection.apply(model).items())


def select_parameters(
    model: nn.Module, select: Selectors | None, *, caller: str
) -> dict[str, nn.Parameter]:
    """Return parameters of ``model`` by clean name; of several names, by the first.

    Like :func:`select_modules`, but a selected module selects all parameters inside of it, a glob
    may also match parameters, and None selects every parameter.
    """
    check_model(model, caller)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    selection = Selection.parse(select, f"{caller}(select")
    selectors: list[Predicate] = [_Glob("*")]
    if selection.modules is not None:
        selectors = [*selection.modules]
    selectors += selection.exclude
    chosen: set[str] = set()
    for matches in selectors:
        inside = {name for name, module in modules.items() if matches(name, module)}
        named = {p for p in parameters if not inside.isdisjoint(owners(p))}
        if isinstance(matches, _Glob):
            named.update(p for p in parameters if matches.matches(p))
            if not named and not inside:
                raise ValueError(
                    _explain_no_match(f"{caller}(select", matches, modules, parameters)
                )
        chosen = chosen - named if matches in selection.exclude else chosen | named
    if not chosen:
        raise ValueError(
            f"{caller}(select=...): selects none of the {_count(parameters, 'parameter')}"
        )
    selected = {id(p): name for name, p in reversed(parameters.items()) if name in chosen}
    return cleaned((name, p) for name, p in parameters.items() if selected.get(id(p)) == name)


def check_model(model: object, caller: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller}(model=...): must be a torch.nn.Module, not {type_of(model)}")


def clean_name(name: str) -> str:
    """Return the name without the parts that torch.compile, FSDP1, checkpointing and DDP add."""
    parts = [part for part in name.split(".") if part not in _WRAPPED]
    return ".".join(parts[1:] if parts[0:1] == [_WRAPPED_ROOT] else parts)


def cleaned(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return the values by their clean names, or by their full ones if two clean names are equal.

    A wrapper and the module it wraps have the same clean name, which gives the wrapped module.
    """
    full = dict(named)
    chosen: dict[str, str] = {}
    for name in full:
        other = chosen.get(clean_name(name))
        if other is not None and not is_inside(name, other):
            return full
        chosen[clean_name(name)] = name
    return {short: full[name] for short, name in chosen.items()}


def evenly(items: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` items, evenly spaced and in order, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


@dataclass(frozen=True)
class _Glob:
    pattern: str
    excludes: bool = False

    def __call__(self, name: str, module: nn.Module) -> bool:
        return self.matches(name)

    def matches(self, name: str) -> bool:
        """Whether the pattern equals or matches the full or the clean name."""
        names = name, clean_name(name)
        return self.pattern in names or any(fnmatchcase(name, self.pattern) for name in names)


def _is_leaf(name: str, module: nn.Module) -> bool:
    """Whether the module computes something itself, rather than through its children."""
    if _PARAMETRIZATIONS in name.split(".") or not _computes(module):
        return False
    children = [child for key, child in module._modules.items() if key != _PARAMETRIZATIONS]
    return not any(_computes(m) for child in children if child is not None for m in child.modules())


def _computes(module: nn.Module) -> bool:
    """Whether the module's forward is ever called."""
    # ParameterList and similar modules have no forward: hooks on them never fire.
    forward = getattr(module, "forward", None)
    can_run = getattr(forward, "__func__", forward) not in (None, nn.Module.forward)
    return can_run and not isinstance(module, _PART_OF_ATTENTION)


def _is_wrapper(name: str, module: nn.Module) -> bool:
    children = list(module._modules.keys())  # iterating fails for modules of torch.jit
    if children == [_WRAPPED_ROOT]:
        return clean_name(name) == ""
    return len(children) == 1 and children[0] in _WRAPPED


def _candidates(model: nn.Module) -> dict[str, nn.Module]:
    return {n: module for n, module in model.named_modules() if not _is_wrapper(n, module)}


def owners(parameter: str) -> Iterator[str]:
    """Return the names of the modules that contain a parameter, including the model's."""
    parts = parameter.split(".")[:-1]
    return (".".join(parts[:length]) for length in range(len(parts) + 1))


def _to_predicate(argument: str, selector: Selector) -> Predicate:
    if isinstance(selector, str):
        return _Glob(selector.removeprefix("!"), selector.startswith("!"))
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return lambda name, module: isinstance(module, selector)
    if callable(selector) and not isinstance(selector, (type, nn.Module)):
        return selector
    shown = reprlib.repr(selector)
    if isinstance(selector, nn.Module):  # its repr shows all modules inside of it
        shown = f"{type(selector).__name__}(...)"
    raise TypeError(
        f"{argument}={shown}): must be a glob over names, a module class, "
        "a predicate(name, module), or several of these"
    )


def _explain_no_match(
    argument: str, glob: _Glob, modules: Collection[str], parameters: Collection[str] = ()
) -> str:
    counted = _count(modules)
    if parameters:
        counted = f"{_count(parameters, 'parameter')} and {counted}"
    message = f'{argument}="{"!" * glob.excludes}{glob.pattern}"): matches none of the {counted}'
    if "[" in glob.pattern:
        message += "; [ begins a set of characters, [[] matches the character [ itself"
    if glob.pattern != glob.pattern.lower():
        message += "; a glob matches names: for a class, pass it or a predicate(name, module)"
    names = filter(None, map(clean_name, [*parameters, *modules]))
    return f"{message}; {closest(glob.pattern, names)}"


def _count(names: Collection[str], what: str = "module") -> str:
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'}"
