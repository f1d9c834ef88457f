"""Which modules and parameters of a model are meant."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TypeAlias, TypeVar

from torch import nn

T = TypeVar("T")
Predicate: TypeAlias = Callable[[str, nn.Module], bool]
Selector: TypeAlias = str | type[nn.Module] | Predicate

# Where wrappers keep the module they wrap: torch.compile, FSDP1, activation checkpointing.
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# The same for DistributedDataParallel and DataParallel. Only at the root: users like the name, too.
_WRAPPED_ROOT = "module"
# torch.nn.utils.parametrize adds this child to a module, which stays a leaf to its user.
_PARAMETRIZATIONS = "parametrizations"
# The class of nn.MultiheadAttention.out_proj, which only lends its parameters.
_PART_OF_ATTENTION = nn.modules.linear.NonDynamicallyQuantizableLinear


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which modules to watch. Holds no model, so that it can be applied to it again and again.

    Attributes:
        modules: A module is watched if one of these says so; None: if it is a leaf.
        exclude: It is not watched if one of these says so.
    """

    modules: tuple[Predicate, ...] | None = None
    exclude: tuple[Predicate, ...] = ()

    @staticmethod
    def parse(
        modules: Selector | Iterable[Selector] | None = None,
        exclude: Selector | Iterable[Selector] | None = None,
    ) -> Selection:
        """A selection from the arguments of ``HookLogger``.

        Args:
            modules: A glob over the names in ``named_modules()`` (case counts, ``*`` crosses dots,
                what wrappers add to a name may be left out), a module class, a
                ``predicate(name, module) -> bool``, or several of these.
            exclude: Likewise.

        Raises:
            TypeError: It is something else.
        """
        return Selection(
            modules=None if modules is None else _parse("HookLogger(modules", modules),
            exclude=() if exclude is None else _parse("HookLogger(exclude", exclude),
        )

    def apply(self, model: nn.Module) -> dict[str, nn.Module]:
        """The watched modules of ``model`` as it is now, in the order of ``named_modules()``.

        A module with several names comes once, under the first. The model itself has the name "".
        Wrappers are never watched, what they wrap is.
        """
        return self._filter(_candidates(model))

    def check(self, model: nn.Module) -> None:
        """Refuse what cannot be meant for this model.

        Raises:
            ValueError: A glob matches no module, or nothing is left of what was asked for.
        """
        candidates = _candidates(model)
        for argument, predicates in (("modules", self.modules or ()), ("exclude", self.exclude)):
            for glob in predicates:
                if isinstance(glob, _Glob) and not _filter_by(glob, candidates):
                    raise ValueError(
                        _explain_no_match(f"HookLogger({argument}", glob.pattern, candidates)
                    )
        if (self.modules is not None or self.exclude) and not self._filter(candidates):
            at_fault = "exclude" if replace(self, exclude=())._filter(candidates) else "modules"
            raise ValueError(
                f"HookLogger({at_fault}=...): leaves none of the {_count(candidates)} to watch"
            )

    def _filter(self, candidates: dict[str, nn.Module]) -> dict[str, nn.Module]:
        wanted = (_is_leaf,) if self.modules is None else self.modules
        return {
            name: module
            for name, module in candidates.items()
            if any(says(name, module) for says in wanted)
            and not any(says(name, module) for says in self.exclude)
        }


def select_modules(
    model: nn.Module, select: Selector | Iterable[Selector] | None, *, caller: str
) -> dict[str, nn.Module]:
    """Modules of ``model`` by clean name, as ``HookLogger(modules=...)`` selects them.

    Args:
        model: Whose modules.
        select: See :meth:`Selection.parse`; None: every leaf module.
        caller: The function that was called; begins the messages of errors.

    Raises:
        TypeError: An argument is something else.
        ValueError: A glob matches no module, or nothing is selected.
    """
    _check_model(model, caller)
    candidates = _candidates(model)
    wanted = None if select is None else _parse(f"{caller}(select", select)
    for glob in wanted or ():
        if isinstance(glob, _Glob) and not _filter_by(glob, candidates):
            raise ValueError(_explain_no_match(f"{caller}(select", glob.pattern, candidates))
    selected = Selection(modules=wanted)._filter(candidates)
    if not selected:
        raise ValueError(f"{caller}(select=...): selects none of the {_count(candidates)}")
    return cleaned(selected.items())


def select_parameters(
    model: nn.Module, select: Selector | Iterable[Selector] | None, *, caller: str
) -> dict[str, nn.Parameter]:
    """Parameters of ``model`` by clean name; one with several names comes once, under the first.

    Args:
        model: Whose parameters.
        select: As for :func:`select_modules`, but a module stands for all parameters inside of it,
            and a glob may name parameters as well; None: every parameter.
        caller: The function that was called; begins the messages of errors.

    Raises:
        TypeError: An argument is something else.
        ValueError: A glob matches neither a parameter nor a module, or nothing is selected.
    """
    _check_model(model, caller)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    wanted = (_Glob("*"),) if select is None else _parse(f"{caller}(select", select)
    chosen: set[str] = set()
    for says in wanted:
        inside = {name for name, module in modules.items() if says(name, module)}
        named = {p for p in parameters if not inside.isdisjoint(_owners(p))}
        if isinstance(says, _Glob):
            named.update(p for p in parameters if says.matches(p))
            if not named and not inside:
                argument = f"{caller}(select"
                raise ValueError(_explain_no_match(argument, says.pattern, modules, parameters))
        chosen |= named
    if not chosen:
        raise ValueError(
            f"{caller}(select=...): selects none of the {_count(parameters, 'parameter')}"
        )
    selected = {id(p): name for name, p in reversed(parameters.items()) if name in chosen}
    return cleaned((name, p) for name, p in parameters.items() if selected.get(id(p)) == name)


def clean_name(name: str) -> str:
    """The name without what wrappers add: torch.compile, FSDP1, checkpointing, DDP's ``module.``.

    A model of the user's own that calls a child of the root ``module`` loses that, too.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPED]
    return ".".join(parts[1:] if parts[0:1] == [_WRAPPED_ROOT] else parts)


def cleaned(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """The values by their clean names; by the full ones should two of those be the same.

    A wrapper and what it wraps have one clean name; it stands for what is wrapped.
    """
    full = dict(named)
    chosen: dict[str, str] = {}
    for name in full:
        other = chosen.get(clean_name(name))
        if other is not None and not f"{name}.".startswith(f"{other}." if other else ""):
            return full
        chosen[clean_name(name)] = name
    return {short: full[name] for short, name in chosen.items()}


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most ``most`` of the items, evenly over their order, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


@dataclass(frozen=True)
class _Glob:
    pattern: str

    def __call__(self, name: str, module: nn.Module) -> bool:
        return self.matches(name)

    def matches(self, name: str) -> bool:
        """Whether the pattern is or fits the name, with or without what wrappers add to it."""
        names = name, clean_name(name)
        return self.pattern in names or any(fnmatchcase(name, self.pattern) for name in names)


@dataclass(frozen=True)
class _IsInstance:
    module_type: type[nn.Module]

    def __call__(self, name: str, module: nn.Module) -> bool:
        return isinstance(module, self.module_type)


def _is_leaf(name: str, module: nn.Module) -> bool:
    """Whether a user would say that it computes something itself."""
    if _PARAMETRIZATIONS in name.split(".") or not _computes(module):
        return False
    children = [child for key, child in module._modules.items() if key != _PARAMETRIZATIONS]
    return not any(_computes(m) for child in children if child is not None for m in child.modules())


def _computes(module: nn.Module) -> bool:
    """Whether anybody calls it."""
    # ParameterList and its like have no forward: hooks on them never fire.
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


def _filter_by(predicate: Predicate, candidates: dict[str, nn.Module]) -> list[str]:
    return [name for name, module in candidates.items() if predicate(name, module)]


def _owners(parameter: str) -> Iterator[str]:
    """Names of the modules that a parameter is inside of, the model's own among them."""
    parts = parameter.split(".")[:-1]
    return (".".join(parts[:length]) for length in range(len(parts) + 1))


def _check_model(model: object, caller: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{caller}(model=...): must be a torch.nn.Module, not {type(model).__name__}"
        )


def _parse(argument: str, value: Selector | Iterable[Selector]) -> tuple[Predicate, ...]:
    if isinstance(value, (str, type)) or not isinstance(value, Iterable):
        value = (value,)
    return tuple(_to_predicate(argument, item) for item in value)


def _to_predicate(argument: str, selector: Selector) -> Predicate:
    if isinstance(selector, str):
        return _Glob(selector)
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return _IsInstance(selector)
    if callable(selector) and not isinstance(selector, (type, nn.Module)):
        return selector
    raise TypeError(
        f"{argument}={selector!r}): must be a glob over names, a module class, "
        "a predicate(name, module), or several of these"
    )


def _explain_no_match(
    argument: str, pattern: str, modules: Collection[str], parameters: Collection[str] = ()
) -> str:
    parts = list(filter(None, map(clean_name, [*parameters, *modules])))
    closest = difflib.get_close_matches(pattern, parts, n=2, cutoff=0)
    counted = _count(modules)
    if parameters:
        counted = f"{_count(parameters, 'parameter')} and {counted}"
    message = f'{argument}="{pattern}"): matches none of the {counted}'
    if "[" in pattern:
        message += "; [ begins a set of characters, [[] is the character itself"
    return f"{message}; the closest names are {', '.join(closest)}" if closest else message


def _count(names: Collection[str], what: str = "module") -> str:
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'}"
