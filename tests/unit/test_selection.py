"""Selection of watched modules: leaves by default, or by globs, types and predicates."""

from __future__ import annotations

import string
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import weight_norm

from telemetry.selection import Selection, Selector, clean_name, cleaned, evenly


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), nn.Sequential(nn.Conv2d(2, 2, 3))
        )
        self.dropout = nn.Dropout()
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


LEAVES = ["encoder.0.0", "encoder.0.1", "encoder.1.0", "dropout", "head"]


def watched(model: nn.Module, modules: object = None, exclude: object = None) -> list[str]:
    selection = Selection.parse(modules, exclude)  # type: ignore[arg-type]
    selection.check(model)
    return list(selection.apply(model))


def test_every_leaf_is_watched_by_default() -> None:
    model = Net()
    selected = Selection.parse().apply(model)
    assert list(selected) == LEAVES
    assert all(model.get_submodule(name) is module for name, module in selected.items())


@pytest.mark.parametrize("name", [*string.punctuation.replace(".", ""), "a[0]", "[!a]", "\n", "*"])
def test_an_exact_name_with_special_characters_selects_its_module(name: str) -> None:
    model = nn.Sequential(nn.ModuleDict({name: nn.Linear(1, 1)}), nn.ReLU())
    assert f"0.{name}" in watched(model, f"0.{name}")


def test_the_error_of_a_glob_with_a_bracket_names_the_escape() -> None:
    model = nn.ModuleDict({"a[0]": nn.Linear(1, 1)})
    assert watched(model, "*a[[]0]*") == ["a[0]"]
    with pytest.raises(ValueError, match=r"\[ begins a set of characters, \[\[\] matches the char"):
        watched(model, "*a[0]*")


def test_a_model_without_parts_is_watched_itself() -> None:
    assert watched(nn.Linear(1, 1)) == [""]


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        ("head", ["head"]),
        ("encoder.?", ["encoder.0", "encoder.1"]),
        ("encoder.*", ["encoder.0", "encoder.0.0", "encoder.0.1", "encoder.1", "encoder.1.0"]),
        (["head", "*.0.0"], ["encoder.0.0", "head"]),
        (nn.Conv2d, ["encoder.0.0", "encoder.1.0"]),
        ((nn.Linear, nn.ReLU, nn.LSTM), ["encoder.0.1", "head"]),
        (lambda name, module: isinstance(module, nn.Sequential) and "." in name,
         ["encoder.0", "encoder.1"]),
        ([nn.Linear, "dropout", lambda name, module: name == ""], ["", "dropout", "head"]),
        (("head",) * 2, ["head"]),
    ],
)  # fmt: skip
def test_modules_picks_by_glob_type_and_predicate(modules: Selector, names: list[str]) -> None:
    assert watched(Net(), modules) == names


@pytest.mark.parametrize(
    ("exclude", "names"),
    [
        ("encoder.*", ["dropout", "head"]),
        (nn.Dropout, ["encoder.0.0", "encoder.0.1", "encoder.1.0", "head"]),
        (["head", lambda name, module: name.endswith(".1")], ["encoder.0.0", "encoder.1.0",
                                                               "dropout"]),
    ],
)  # fmt: skip
def test_exclude_omits_by_glob_type_and_predicate(exclude: object, names: list[str]) -> None:
    assert watched(Net(), exclude=exclude) == names


def test_exclude_wins_over_modules() -> None:
    assert watched(Net(), modules="encoder.*", exclude=["encoder.1*", nn.Sequential]) == [
        "encoder.0.0",
        "encoder.0.1",
    ]


class Encoder(nn.Module):
    """Module with a direct parameter, attention whose projection never runs, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.position = nn.Parameter(torch.zeros(4))
        self.attn = nn.MultiheadAttention(4, 2)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("modules", "exclude", "recorded"),
    [
        (None, None, "embed position attn attn.out_proj norm head"),
        ("*attn*", None, "attn attn.out_proj"),
        (["norm", "head"], None, "embed norm head"),
        (None, "attn", "embed position norm head"),
        (None, ["embed", "norm"], "embed position attn attn.out_proj head"),
        (None, ["embed", "head", nn.LayerNorm], "position attn attn.out_proj"),
        ("", "attn", "embed position norm head"),
        (["", "attn.out_proj"], "attn", "embed position attn.out_proj norm head"),
    ],
)
def test_parameters_of_watched_modules_and_below_are_recorded(
    modules: Any, exclude: Any, recorded: str
) -> None:
    model = Encoder()
    found = Selection.parse(modules, exclude).parameters(model)
    owners = {n.rpartition(".")[0] for n, p in model.named_parameters() if id(p) in found}
    assert owners == {"" if name == "position" else name for name in recorded.split()}


def test_globs_are_case_sensitive() -> None:
    with pytest.raises(ValueError, match="matches none"):
        watched(Net(), "Head")


def test_a_glob_that_matches_nothing_names_the_closest() -> None:
    model = nn.ModuleDict({"encoder": nn.Sequential(*(nn.Identity() for _ in range(35)))})
    with pytest.raises(
        ValueError,
        match=r'HookLogger\(modules="encodr\.1"\): matches none of the 37 modules; '
        r"the closest names are encoder\.1, encoder\.\d+",
    ):
        watched(model, ["encoder.*", "encodr.1"])


def test_names_that_are_not_close_are_not_suggested() -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(12)))
    with pytest.raises(ValueError, match=r"their names are 0, 1, 2, 3, 4 and 7 more$"):
        watched(model, "nothing*")


def test_an_exclude_glob_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r'exclude="drpout"\): .*names are dropout'):
        watched(Net(), exclude="drpout")


def test_a_glob_on_a_model_without_parts_is_refused() -> None:
    with pytest.raises(ValueError, match=r'modules="fc"\): matches none of the 1 module$'):
        watched(nn.Linear(1, 1), "fc")


@pytest.mark.parametrize(
    ("modules", "exclude", "message"),
    [
        (nn.LSTM, None, r"HookLogger\(modules=\.\.\.\): leaves none of the 9 modules"),
        ((), None, r"HookLogger\(modules=\.\.\.\): leaves none"),
        (None, "*", r"HookLogger\(exclude=\.\.\.\): leaves none"),
        (nn.LSTM, "head", r"HookLogger\(modules=\.\.\.\): leaves none"),
        (nn.Linear, nn.Module, r"HookLogger\(exclude=\.\.\.\): leaves none"),
    ],
)
def test_a_selection_of_nothing_is_refused(modules: object, exclude: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        watched(Net(), modules, exclude)


@pytest.mark.parametrize("argument", ["modules", "exclude"])
@pytest.mark.parametrize("value", [3, [3], int, nn.Linear(1, 1), ["head", None], b"head"])
def test_other_selectors_are_refused(argument: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"HookLogger\({argument}=.*must be a glob"):
        Selection.parse(**{argument: value})  # type: ignore[arg-type]


def test_replaced_modules_are_found_when_applied_again() -> None:
    model = Net()
    selection = Selection.parse("head*")
    selection.check(model)
    model.head = nn.Sequential(nn.Linear(2, 2))  # type: ignore[assignment]
    assert list(selection.apply(model)) == ["head", "head.0"]
    del model.head
    assert selection.apply(model) == {}


def test_a_shared_module_is_watched_once_under_its_first_name() -> None:
    shared = nn.Linear(1, 1)
    assert watched(nn.Sequential(shared, nn.ReLU(), shared)) == ["0", "1"]


def test_modules_that_cannot_run_are_not_leaves() -> None:
    model = Net()
    model.scales = nn.ParameterList([nn.Parameter(torch.ones(1))])
    model.spare = nn.ModuleList()
    assert watched(model) == LEAVES


def test_modules_that_only_hold_parameters_do_not_make_a_parent() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.scales = nn.ParameterDict({"x": nn.Parameter(torch.ones(1))})

    model = nn.Sequential(Scaled(), nn.MultiheadAttention(2, 1), nn.ModuleList([nn.Linear(2, 2)]))
    assert watched(model) == ["0", "1", "2.0"]


def test_a_missing_child_does_not_make_a_parent() -> None:
    layer = nn.Linear(1, 1)
    layer.register_module("bias_net", None)
    assert watched(nn.Sequential(layer)) == ["0"]


def test_a_child_that_a_user_named_module_is_not_a_wrapped_module() -> None:
    block = nn.Sequential()
    block.module = nn.Linear(1, 1)
    model = nn.Sequential(block, nn.ReLU())
    assert watched(model, "0*") == ["0", "0.module"]


def test_a_parametrized_module_stays_a_leaf() -> None:
    assert watched(nn.Sequential(weight_norm(nn.Linear(2, 2)), nn.ReLU())) == ["0", "1"]


def test_wrappers_are_not_watched_and_globs_may_omit_them() -> None:
    model = torch.compile(nn.DataParallel(Net()), backend="eager")
    prefix = "_orig_mod.module"
    assert watched(model) == [f"{prefix}.{leaf}" for leaf in LEAVES]
    assert watched(model, "head") == watched(model, f"{prefix}.head") == [f"{prefix}.head"]
    assert watched(model, lambda name, module: clean_name(name) == "") == [prefix]


def test_a_checkpointed_block_is_watched_once() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1)))
    assert watched(model, "0") == ["0._checkpoint_wrapped_module"]


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("", ""),
        ("module", ""),
        ("_orig_mod", ""),
        ("encoder.0", "encoder.0"),
        ("module.encoder.0", "encoder.0"),
        ("_orig_mod.module.encoder.0", "encoder.0"),
        ("module._orig_mod.encoder.0.weight", "encoder.0.weight"),
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module.b", "a.b"),
        ("a._checkpoint_wrapped_module.b", "a.b"),
        ("encoder.module.0", "encoder.module.0"),
        ("modules.0", "modules.0"),
    ],
)
def test_names_are_cleaned_of_wrappers(name: str, clean: str) -> None:
    assert clean_name(name) == clean


def test_clean_names_are_the_keys_unless_two_are_the_same() -> None:
    assert cleaned([("module.a", 1), ("module.b", 2)]) == {"a": 1, "b": 2}
    assert cleaned([("module.a", 1), ("a", 2)]) == {"module.a": 1, "a": 2}


def test_a_clean_name_names_the_wrapped_module() -> None:
    model = torch.compile(nn.DataParallel(Net()), backend="eager")
    modules = cleaned(model.named_modules())
    assert modules.keys() == dict(Net().named_modules()).keys()
    assert isinstance(modules[""], Net)
    block = nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1)))
    assert [type(m) for m in cleaned(block.named_modules()).values()] == [nn.Sequential, nn.Linear]


@pytest.mark.parametrize(
    ("count", "most", "kept"),
    [(0, 3, []), (3, 3, [0, 1, 2]), (5, 3, [0, 2, 4]), (100, 4, [0, 33, 66, 99]), (4, 2, [0, 3])],
)
def test_a_spread_keeps_the_ends_and_even_steps(count: int, most: int, kept: list[int]) -> None:
    assert evenly(range(count), most) == kept


def calls_to_select(count: int) -> int:
    """Count the function calls that select ``count`` of three times as many modules."""
    model = nn.Sequential(*(nn.Sequential(nn.ReLU(), nn.ReLU()) for _ in range(count)))
    selection = Selection.parse("*.1", nn.Linear)
    calls = 0

    def tally(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(tally)
    try:
        selected = selection.apply(model)
    finally:
        sys.setprofile(None)
    assert len(selected) == count
    return calls


@pytest.mark.slow
def test_calls_to_select_grow_linearly_with_the_modules() -> None:
    assert calls_to_select(3000) < 11 * calls_to_select(300)
