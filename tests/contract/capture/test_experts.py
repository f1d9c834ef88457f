"""Loads of experts equal a count of the choices that the model makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import telemetry
from telemetry import HookLogger
from telemetry.capture.experts import Router, routers, tokens_per_expert
from telemetry.testing import capture_run
from tests.helpers.applied import Applied
from tests.helpers.require import needs_observable_graphs
from tests.helpers.twins import assert_left_alone

EXPERTS = 6


class Mixture(nn.Module):
    """Routed linear layers, and the choices of its last calls.

    ``form``: output of the router: logits, indices ``(weights, indices)`` or a mask of 0 and 1.
    """

    def __init__(self, form: str = "logits", top_k: int = 2, width: int = 8) -> None:
        super().__init__()
        self.top_k, self.form = top_k, form
        self.router = nn.Linear(width, EXPERTS) if form == "logits" else Choice(form, width, top_k)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS))
        self.chosen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "logits":
            weights, indices = self.router(x).softmax(-1).topk(self.top_k)
        elif self.form == "indices":
            weights, indices = self.router(x)
        else:
            mask, probabilities = self.router(x)
            weights, indices = (probabilities * mask).topk(self.top_k)
        self.chosen.append(indices.detach())
        outputs = torch.stack([expert(x) for expert in self.experts], -2)
        picked = outputs.gather(-2, indices[..., None].expand(*indices.shape, x.shape[-1]))
        return (weights[..., None] * picked).sum(-2)


class Choice(nn.Module):
    """DeepSeek's gate: sigmoid scores, chosen with a bias that no output shows; or a mask."""

    bias_of_experts: Tensor

    def __init__(self, form: str, width: int, top_k: int) -> None:
        super().__init__()
        self.form, self.top_k = form, top_k
        self.weight = nn.Parameter(torch.randn(EXPERTS, width))
        self.register_buffer("bias_of_experts", torch.tensor([9.0] + [0.0] * (EXPERTS - 1)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).sigmoid()
        indices = (scores + self.bias_of_experts).topk(self.top_k).indices
        if self.form == "indices":
            return scores.gather(-1, indices), indices
        return torch.zeros_like(scores).scatter(-1, indices, 1.0).long(), scores


def model(form: str = "logits", top_k: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), Mixture(form, top_k), nn.Linear(8, 2))


def loop(built: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
    """Three steps of two micro-batches each; the choices of the last step remain."""
    optimizer = torch.optim.SGD(built.parameters(), 0.1)
    mixture = next(module for module in built.modules() if isinstance(module, Mixture))
    for _ in range(3):
        mixture.chosen.clear()
        optimizer.zero_grad()
        for _ in range(2):
            loss = built(torch.randn(5, 7, 4)).square().mean()
            loss.backward()
            yield loss
        yield from (p.grad for p in built.parameters() if p.grad is not None)
        optimizer.step()


def counted(indices: list[Tensor]) -> list[int]:
    flat = torch.cat([chosen.flatten() for chosen in indices])
    return [int((flat == expert).sum()) for expert in range(EXPERTS)]


@pytest.mark.parametrize(
    ("form", "top_k"),
    [("logits", 1), ("logits", 2), ("indices", 1), ("indices", EXPERTS), ("mask", 1), ("mask", 2)],
)
def test_loads_count_the_choices_of_all_micro_batches_and_training_is_left_alone(
    tmp_path: Path, form: str, top_k: int
) -> None:
    watched = assert_left_alone(lambda: model(form, top_k), loop, tmp_path)
    record, mixture = watched.full[-1], watched.model.get_submodule("1")
    assert isinstance(mixture, Mixture)
    assert {n: load.tolist() for n, load in record.expert_loads.items()} == {
        "1.router": counted(mixture.chosen)
    }
    assert record.expert_loads["1.router"].sum() == 2 * 5 * 7 * top_k


def test_statistics_equal_their_definitions_and_experts_are_units(tmp_path: Path) -> None:
    watched = assert_left_alone(lambda: model("indices", 1), loop, tmp_path)
    load = watched.full[-1].expert_loads["1.router"].astype(np.float64)
    shares = [share for share in (load / load.sum()).tolist() if share]
    wanted = {
        "expert_load_cv": np.std(load) / np.mean(load),
        "effective_experts": math.exp(-sum(share * math.log(share) for share in shares)),
        "dead_experts": np.mean(load == 0),
    }
    assert wanted["dead_experts"] > 0  # the bias starves all
    run = telemetry.read(tmp_path)
    for name, value in wanted.items():
        found = run.layers[run.layers["statistic"] == name]
        assert {*found["module_name"]} == {"1.router"}
        assert found["value"].iloc[-1] == pytest.approx(value)
    units = run.units("1.router").extremes[-1]
    np.testing.assert_allclose(units, np.stack([load, load], axis=1), rtol=2**-7)


@pytest.mark.slow
@needs_observable_graphs
def test_loads_in_compiled_graphs_are_counted() -> None:
    torch.compiler.reset()
    built = model()
    with capture_run(built) as run:
        compiled = torch.compile(built, backend="eager")
        optimizer = torch.optim.SGD(built.parameters(), 0.1)
        for _ in range(2):
            x = torch.randn(35, 4)
            with torch.no_grad():
                wanted = built[1].router(built[0](x)).topk(2).indices
            compiled(x).square().mean().backward()
            optimizer.step()
    assert run.records[-1].expert_loads["1.router"].tolist() == counted([wanted])


def test_a_number_of_experts_or_a_list_beside_a_router_makes_it_one() -> None:
    def found(**children: nn.Module) -> Router | None:
        parent = Applied(lambda m: None, **children)
        return routers(nn.Sequential(parent)).get(id(children.get("gate")))

    gate = nn.Linear(4, 3, bias=False)
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    assert found(gate=gate) is None
    assert found(gate=gate, up=nn.Linear(4, 3)) is None  # a gated linear unit
    assert found(gate=gate, experts=experts) == Router(experts=3, chosen=1)
    assert found(gate=gate, layers=nn.ModuleList([gate]), experts=experts) is not None
    fused = nn.ParameterDict({"w": torch.zeros(3, 4, 4)})
    assert found(gate=gate, experts=fused) == Router(experts=3, chosen=1)
    assert found(projection=gate, experts=experts) is None
    corrected = nn.Linear(4, 3, bias=False)
    corrected.register_buffer("e_score_correction_bias", torch.zeros(3))
    router = found(gate=corrected, experts=experts)
    assert router is not None
    assert tokens_per_expert(torch.randn(5, 3), router) is None
    told = nn.Linear(4, 3)
    told.num_experts, told.top_k = 3, 2  # type: ignore[assignment]
    assert found(gate=told) == Router(experts=3, chosen=2)


@given(st.lists(st.lists(st.integers(-2, 8), min_size=2, max_size=2), max_size=9))
def test_indices_outside_of_the_experts_are_dropped_tokens(indices: list[list[int]]) -> None:
    chosen = torch.tensor(indices, dtype=torch.int32).reshape(-1, 2)
    counts = tokens_per_expert(chosen, Router(experts=EXPERTS, chosen=2))
    assert counts is not None
    assert counts.tolist() == counted([chosen])


def test_other_outputs_show_no_choice() -> None:
    router = Router(experts=EXPERTS, chosen=2)
    for other in (torch.zeros(7, 5), torch.zeros(EXPERTS), torch.zeros(EXPERTS).long()):
        assert tokens_per_expert(other, router) is None


def mixtral(transformers: Any, common: dict[str, int]) -> nn.Module:
    config = transformers.MixtralConfig(**common, num_local_experts=8, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def deepseek(transformers: Any, common: dict[str, int]) -> nn.Module:
    config = transformers.DeepseekV3Config(
        **common, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        moe_intermediate_size=16, first_k_dense_replace=0, q_lora_rank=16, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def qwen(transformers: Any, common: dict[str, int]) -> nn.Module:
    config = transformers.Qwen2MoeConfig(
        **common, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config)


@pytest.mark.slow
@pytest.mark.parametrize("make", [mixtral, deepseek, qwen])
def test_loads_of_language_models_equal_what_their_experts_receive(
    make: Callable[[Any, dict[str, int]], nn.Module],
) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    common = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4,
    }  # fmt: skip
    built, received = make(transformers, common), {}
    for name, module in built.named_modules():
        if name.endswith("mlp.experts"):
            gate = name.replace("experts", "gate")
            module.register_forward_pre_hook(
                lambda _, args, gate=gate: received.update({gate: counts_of(args[1])})
            )
    with capture_run(built) as run:
        optimizer = torch.optim.AdamW(built.parameters(), 1e-3)
        tokens = torch.randint(0, 64, (4, 16))
        built(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    loads = run.records[-1].expert_loads
    assert len(loads) == 2
    assert {name: load.tolist() for name, load in loads.items()} == received


def counts_of(indices: Tensor) -> list[int]:
    return torch.bincount(indices.flatten(), minlength=8).tolist()
