"""Selection of watched modules: leaves by default, or by globs, types and predicates."""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import weight_norm

from telemetry import HookLogger, StepRecord
from telemetry.testing import capture_run
from tests.helpers.applied import Applied
from tests.helpers.twins import descend, one_step


class Chain(nn.Module):
    """Calls its parts in turn, whatever they are called, except for containers."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = x if isinstance(part, nn.ModuleList | nn.ParameterList) else part(x)
        return x


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def net() -> Chain:
    """Two blocks and a head."""
    blocks = nn.Sequential(nn.Sequential(linear(), nn.ReLU()), nn.Sequential(linear()))
    return Chain({"encoder": blocks, "dropout": nn.Dropout(), "head": nn.LayerNorm(2)})


LEAVES = ["encoder.0.0", "encoder.0.1", "encoder.1.0", "dropout", "head"]


def record_of(model: nn.Module, modules: Any = None, inputs: Tensor | None = None) -> StepRecord:
    return one_step(model, torch.ones(1, 2) if inputs is None else inputs, modules=modules)


def watched(model: nn.Module, modules: Any = None) -> list[str]:
    """Return the modules whose outputs are measured, in the order of their names."""
    return sorted(record_of(model, modules).activations)


@pytest.mark.parametrize("name", [*string.punctuation.replace(".", ""), "a[0]", "[!a]", "\n"])
def test_an_exact_name_with_special_characters_selects_its_module(name: str) -> None:
    model = nn.Sequential(Chain({name: linear()}), nn.ReLU())
    assert f"0.{name}" in watched(model, f"0.{name}")


def inner(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and "." in name


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (None, " ".join(LEAVES)),
        ("head", "head"),
        (("head",) * 2, "head"),
        ("encoder.?", "encoder.0 encoder.1"),
        ("encoder.*", "encoder.0 encoder.0.0 encoder.0.1 encoder.1 encoder.1.0"),
        (["head", "*.0.0"], "encoder.0.0 head"),
        (nn.Linear, "encoder.0.0 encoder.1.0"),
        ((nn.LayerNorm, nn.ReLU, nn.LSTM), "encoder.0.1 head"),
        (inner, "encoder.0 encoder.1"),
        ([nn.LayerNorm, "dropout", inner], "dropout encoder.0 encoder.1 head"),
        ("!encoder.*", "dropout head"),
        (["!head", "!*.1"], "dropout encoder.0.0 encoder.1.0"),
        (["!encoder.1*", "!encoder.?", "encoder.*"], "encoder.0.0 encoder.0.1"),
        ([nn.Linear, "!*.1.0"], "encoder.0.0"),
    ],
)
def test_globs_types_and_predicates_pick_modules_and_exclusion_wins(
    modules: Any, names: str
) -> None:
    assert watched(net(), modules) == sorted(names.split())


def encoder() -> nn.Module:
    """Module with a direct parameter, attention whose projection never runs, a tied head."""

    def forward(m: Any, tokens: Tensor) -> Tensor:
        x = m.embed(tokens) + m.position
        return m.head(m.norm(m.attn(x, x, x)[0]))

    embed, attn = nn.Embedding(5, 4), nn.MultiheadAttention(4, 2)
    model = Applied(forward, embed=embed, attn=attn, norm=nn.LayerNorm(4), head=nn.Linear(4, 5))
    model.position, model.head.weight = nn.Parameter(torch.zeros(4)), embed.weight
    return model


@pytest.mark.parametrize(
    ("modules", "recorded"),
    [
        (None, "embed position attn attn.out_proj norm head"),
        ("*attn*", "attn attn.out_proj"),
        (["norm", "head"], "embed norm head"),
        ("!attn", "embed position norm head"),
        (["!embed", "!norm"], "embed position attn attn.out_proj head"),
        (["!embed", "!head", "!norm"], "position attn attn.out_proj"),
        (["", "!attn"], "embed position norm head"),
        (["", "attn.out_proj", "!attn"], "embed position attn.out_proj norm head"),
    ],
)
def test_parameters_of_watched_modules_and_below_are_recorded(modules: Any, recorded: str) -> None:
    tokens = torch.arange(4).reshape(2, 2)
    layout = record_of(encoder(), modules, tokens).layout
    owners = {p.name.rpartition(".")[0] for p in layout.parameters if p.recorded}
    assert owners == {"" if name == "position" else name for name in recorded.split()}


# --- what is refused -----------------------------------------------------------------------------


def many() -> nn.Module:
    return nn.ModuleDict({"encoder": nn.Sequential(*(linear() for _ in range(35)))})


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (net(), {"modules": "Head"}, "matches none.*; a glob matches names"),  # case-sensitive
        (
            many(),
            {"modules": ["encoder.*", "encodr.1"]},
            r'HookLogger\(modules="encodr\.1"\): matches none of the 37 modules; '
            r"the closest are encoder\.1, encoder\.\d+",
        ),
        (
            nn.Sequential(*(linear() for _ in range(12))),
            {"modules": "nothing*"},
            r"there are 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more$",
        ),
        (net(), {"modules": "!drpout"}, r'modules="!drpout"\): .*the closest are dropout'),
        (linear(), {"modules": "fc"}, r'modules="fc"\): .*; there are none$'),
        (
            Chain({"a[0]": linear()}),
            {"modules": "*a[0]*"},
            r"\[ begins a set of characters, \[\[\] matches the char",
        ),
        (net(), {"modules": nn.LSTM}, r"HookLogger\(modules=\.\.\.\): selects none of the 9"),
        (net(), {"modules": ()}, r"HookLogger\(modules=\.\.\.\): selects none"),
        (net(), {"modules": "!*"}, r"HookLogger\(modules=\.\.\.\): selects none"),
        (net(), {"modules": [nn.LSTM, "!head"]}, r"\(modules=\.\.\.\): selects none"),
    ],
)
def test_a_selection_of_nothing_is_refused_with_the_closest_names(
    tmp_path: Path, model: nn.Module, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        HookLogger(model, tmp_path, **options)


@pytest.mark.parametrize("value", [3, [3], int, nn.Linear(1, 1), ["head", None], b"head"])
def test_other_selectors_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"HookLogger\(modules=.*must be a glob"):
        HookLogger(net(), tmp_path, modules=value)


# --- what is a leaf, and its name ----------------------------------------------------------------


def test_a_leaf_is_a_module_whose_parts_cannot_run() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.scales = nn.ParameterDict({"x": nn.Parameter(torch.ones(1))})
            self.register_module("bias_net", None)

    shared = linear()
    parts = {
        "alone": nn.ParameterList([nn.Parameter(torch.ones(1))]),
        "spare": nn.ModuleList(),
        "scaled": Scaled(),
        "normed": weight_norm(linear()),
        "checkpointed": checkpoint_wrapper(linear()),
        "first": shared,
        "again": shared,
    }
    assert watched(Chain(parts)) == ["checkpointed", "first", "normed", "scaled"]
    assert watched(linear()) == [""]


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("encoder.0", "encoder.0"),
        ("module.encoder.0", "encoder.0"),
        ("_orig_mod.module.encoder.0", "encoder.0"),
        ("module._orig_mod.encoder.0", "encoder.0"),
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module.b", "a.b"),
        ("a._checkpoint_wrapped_module.b", "a.b"),
        ("encoder.module.0", "encoder.module.0"),
        ("modular.0", "modular.0"),
    ],
)
def test_names_are_cleaned_of_wrappers(name: str, clean: str) -> None:
    model: nn.Module = linear()
    for part in reversed(name.split(".")):
        model = Chain({part: model})
    assert watched(model) == watched(model, name) == watched(model, clean) == [clean]


def test_names_are_kept_if_two_would_be_the_same() -> None:
    model = Chain({"module": linear(), "a": Chain({"module": linear()})})
    assert watched(model) == ["", "a.module"]
    model = Chain({"module": Chain({"a": linear(), "b": linear()}), "a": linear()})
    assert watched(model) == ["a", "module.a", "module.b"]


def test_a_wrapped_model_has_the_names_of_the_model() -> None:
    model = torch.compile(nn.DataParallel(net()), backend="eager")
    assert watched(model) == sorted(LEAVES)
    assert watched(model, "head") == watched(model, "_orig_mod.module.head") == ["head"]


def test_replaced_modules_are_found_at_the_next_step() -> None:
    model = net()
    with capture_run(model, modules="head*", rules=[]) as run:
        for _ in range(2):
            descend(model, torch.ones(1, 2))
            model.head = nn.Sequential(linear())
    assert [sorted(r.activations) for r in run.records] == [["head"], ["head", "head.0"]]
