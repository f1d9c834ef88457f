"""Programs of other authors train to the same bit, with the statistics of plain hooks.

Each program trains a model and reports the end of each step. It runs bare, with a logger, and with
plain hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from telemetry import HookLogger
from tests.helpers.applied import Applied
from tests.helpers.hand import assert_logged, not_training, plain_hooks, selective_checkpoint
from tests.helpers.require import GRAPHS_CAN_BE_OBSERVED
from tests.helpers.twins import assert_left_alone, batch, loss_of

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of PyTorch

STEPS = 6


class Program:
    """Arguments of a program.

    Attributes:
        model: The measured model.
        step_ended: Called at the end of each step.
        compiles: Whether pieces may be compiled: plain hooks do not see into those.
    """

    def __init__(
        self,
        model: nn.Module,
        step_ended: Callable[[], object] = lambda: None,
        compiles: bool = True,
    ) -> None:
        self.model, self.step_ended, self.compiles = model, step_ended, compiles

    def steps(self, *optimizers: Optimizer, count: int = STEPS) -> Iterator[int]:
        """The usual loop, by SGD unless others are given; its body leaves gradients."""
        optimizers = optimizers or (SGD(self.model.parameters(), 0.1),)
        for index in range(count):
            for optimizer in optimizers:
                optimizer.zero_grad()
            yield index
            for optimizer in optimizers:
                optimizer.step()
            self.step_ended()

    def compiled(self, function: Any) -> Any:
        return torch.compile(function, backend="aot_eager") if self.compiles else function


Train = Callable[[Program], None]
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Train]] = {}


def program(make: Callable[[], nn.Module]) -> Callable[[Train], Train]:
    def add(train: Train) -> Train:
        PROGRAMS[train.__name__] = make, train
        return train

    return add


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


# --- other models and optimizers in the usual loop ---


def halves(model: nn.Module, *, momentum_first: bool) -> list[Optimizer]:
    """Matrices by one optimizer and the rest by another, as with Muon beside AdamW."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    both: list[Optimizer] = [SGD(matrices, 0.05, momentum=0.9), AdamW(others, 0.01)]
    return both if momentum_first else both[::-1]


def shared() -> nn.Sequential:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(inplace=True), layer, nn.ReLU(inplace=True))


def hooked_net() -> nn.Sequential:
    model = net()
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[2].register_full_backward_hook(lambda module, grad_in, grad_out: None)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * 0.5)
    return model


def plain_loop(
    p: Program,
    optimizers: Callable[[nn.Module], list[Optimizer]],
    loss: Callable[[nn.Module], Tensor] = loss_of,
    passes: int = 1,
) -> None:
    for _ in p.steps(*optimizers(p.model)):
        for _ in range(passes):
            loss(p.model).backward()


def sgd(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), 0.1)]


PLAIN: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], list[Optimizer]]]] = {
    "plain_loop": (net, sgd),
    "fused_optimizer": (net, lambda m: [torch.optim.Adam(m.parameters(), 0.01, fused=True)]),
    "muon_before_adamw": (net, partial(halves, momentum_first=True)),
    "adamw_before_muon": (net, partial(halves, momentum_first=False)),
    "checkpointed": (lambda: Blocks(partial(checkpoint, use_reentrant=False)), sgd),
    "shared_layer_and_in_place": (shared, sgd),
    "parametrized": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2)),
        sgd,
    ),
    "with_hooks_of_others": (hooked_net, sgd),
}
for name, (make, optimizers_of) in PLAIN.items():
    PROGRAMS[name] = make, partial(plain_loop, optimizers=optimizers_of)


def two_views_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def under_autocast(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(batch()).float().square().mean()


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "two_views": (two_views_net, lambda m: (m(batch()) - m(batch())).square().mean()),
    "autocast_to_bfloat16": (net, under_autocast),
    "double_precision": (lambda: net().double(), lambda m: loss_of(m, batch().double())),
    "checkpointed_with_reentry": (
        lambda: Blocks(partial(checkpoint, use_reentrant=True)),
        lambda m: loss_of(m, batch().requires_grad_()),
    ),
}
for name, (make, loss) in LOSSES.items():
    PROGRAMS[name] = make, partial(plain_loop, optimizers=sgd, loss=loss)
PROGRAMS["selectively_checkpointed_micro_batches"] = (
    lambda: Blocks(selective_checkpoint),
    partial(plain_loop, optimizers=sgd, passes=2),
)


# --- one optimizer --------------------------------------------------------------------------------


@program(net)
def clipped_with_schedule(p: Program) -> None:
    optimizer = AdamW(p.model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS)
    for _ in range(STEPS):
        loss_of(p.model).backward()
        nn.utils.clip_grad_norm_(p.model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=False)
        p.step_ended()


@program(net)
def accumulated_gradients(p: Program) -> None:
    optimizer = AdamW(p.model.parameters(), 0.01)
    for micro in range(4 * STEPS):
        (loss_of(p.model) / 4).backward()
        if micro % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            p.step_ended()


@program(net)
def two_losses_of_one_graph(p: Program) -> None:
    for _ in p.steps():
        out = p.model(batch())
        out.square().mean().backward(retain_graph=True)
        out.abs().mean().backward()


def step_by_closures(p: Program, make: Callable[..., Optimizer]) -> None:
    optimizer = make(p.model.parameters())

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(p.model)
        loss.backward()
        return loss.item()

    def failing() -> float:
        raise KeyError

    for _ in range(STEPS):
        with pytest.raises(KeyError):  # which ends no step
            optimizer.step(failing)
        optimizer.step(closure=closure)
        p.step_ended()


PROGRAMS["closure_of_lbfgs"] = (
    net,
    partial(step_by_closures, make=partial(torch.optim.LBFGS, lr=0.1, max_iter=1)),
)
PROGRAMS["closure_of_sgd"] = net, partial(step_by_closures, make=partial(SGD, lr=0.1, momentum=0.9))


@program(net)
def sharpness_aware(p: Program) -> None:
    """SAM: the gradients of a second pass, at weights that were moved by hand, are stepped with."""
    optimizer = SGD(p.model.parameters(), 0.1)
    for _ in p.steps(optimizer):
        x, moved = batch(), []
        p.model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in p.model.parameters():
                assert parameter.grad is not None
                moved.append(0.01 * parameter.grad)
                parameter += moved[-1]
        optimizer.zero_grad()
        p.model(x).square().mean().backward()
        with torch.no_grad():
            for parameter, by in zip(p.model.parameters(), moved, strict=True):
                parameter -= by


@program(net)
def gradients_by_autograd_grad(p: Program) -> None:
    parameters = list(p.model.parameters())
    optimizer = SGD(parameters, 0.1)
    for _ in p.steps(optimizer):
        grads = torch.autograd.grad(loss_of(p.model), parameters)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad


@program(net)
def gradient_penalty(p: Program) -> None:
    for _ in p.steps():
        x = batch().requires_grad_()
        out = p.model(x).mean()
        with not_training():
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.square().sum()).backward()


# --- several optimizers ---------------------------------------------------------------------------


@program(net)
def sparse_and_dense(p: Program) -> None:
    """Each optimizer empties its own gradients right after its step."""
    first, second = halves(p.model, momentum_first=True)
    for _ in range(STEPS):
        loss_of(p.model).backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
        p.step_ended()


def actor_critic() -> nn.Module:
    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = m.trunk(x).relu()
        return m.actor(hidden), m.critic(hidden)

    trunk, actor, critic = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)
    return Applied(forward, trunk=trunk, actor=actor, critic=critic)


@program(actor_critic)
def ppo(p: Program) -> None:
    """A rollout without gradients, then some epochs of minibatches over it."""
    optimizer = torch.optim.Adam(p.model.parameters(), 0.01)
    for _ in range(STEPS // 2):
        with torch.no_grad():
            states = torch.randn(12, 4)
            old = p.model(states)[0].log_softmax(-1)
        for part in states.split(6):
            logits, value = p.model(part)
            ratio = (logits.log_softmax(-1) - old[: len(part)]).exp()
            loss = ratio.clamp(0.8, 1.2).mean() + value.square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(p.model.parameters(), 0.5)
            optimizer.step()
            p.step_ended()


@program(actor_critic)
def dqn_with_target(p: Program) -> None:
    target = copy.deepcopy(p.model)
    for index in p.steps():
        if index % 2:
            target.load_state_dict(p.model.state_dict())
        with torch.no_grad():
            goal = target(batch())[0].amax(-1)
        actions, value = p.model(batch())
        (actions.amax(-1) - goal + value.mean()).square().mean().backward()


@program(net)
def generator_of_a_gan(p: Program) -> None:
    critic = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    for_critic, for_generator = SGD(critic.parameters(), 0.1), SGD(p.model.parameters(), 0.1)
    for _ in range(STEPS):
        for_critic.zero_grad()
        (critic(torch.randn(6, 2)) - critic(p.model(batch()).detach())).mean().backward()
        for_critic.step()
        for_generator.zero_grad()
        critic(p.model(batch())).mean().backward()
        for_generator.step()
        p.step_ended()


@program(lambda: nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
def critic_of_a_gan(p: Program) -> None:
    """The critic steps three times as often; the generator's passes leave gradients in it."""
    generator = net()
    for_critic, for_generator = SGD(p.model.parameters(), 0.1), SGD(generator.parameters(), 0.1)
    for index in range(STEPS):
        fake = generator(batch()).detach()
        for_critic.zero_grad()
        (p.model(torch.randn(6, 2)) - p.model(fake)).mean().backward()
        for_critic.step()
        p.step_ended()
        if index % 3 == 2 and index < STEPS - 1:
            p.model.requires_grad_(False)
            for_generator.zero_grad()
            with torch.no_grad():
                p.model(fake)
            generator(batch()).mean().backward()
            for_generator.step()
            p.model.requires_grad_(True)


@program(net)
def optimizer_made_anew(p: Program) -> None:
    for _ in range(STEPS // 2):
        for _ in p.steps(SGD(p.model.parameters(), 0.1), count=2):
            loss_of(p.model).backward()


@program(net)
def step_inside_backward(p: Program) -> None:
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    optimizers = {parameter: SGD([parameter], 0.1) for parameter in p.model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in p.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(STEPS):
        loss_of(p.model).backward()
        p.step_ended()


# --- what runs, and how often ---------------------------------------------------------------------


class Blocks(nn.Module):
    """Three residual blocks, which ``run`` may checkpoint."""

    def __init__(self, run: Callable[..., Tensor] = lambda block, x: block(x)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(4, 2)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.run(block, x)
        out: Tensor = self.head(x)
        return out


@program(Blocks)
def layers_dropped_at_random(p: Program) -> None:
    model: Any = p.model
    for index in p.steps():
        x = batch()
        for number, block in enumerate(model.blocks):
            if (index + number) % 3:
                x = x + block(x)
        model.head(x).square().mean().backward()


@program(net)
def layer_added(p: Program) -> None:
    model: Any = p.model
    optimizer = SGD(p.model.parameters(), 0.1)
    for index in p.steps(optimizer):
        if index == 3:
            model.append(nn.Linear(2, 2))
            optimizer.add_param_group({"params": model[-1].parameters()})
        loss_of(p.model).backward()


@program(net)
def head_replaced(p: Program) -> None:
    model: Any = p.model
    for start in range(0, STEPS, 3):
        model[4] = nn.Linear(8, 2 + start)
        for _ in p.steps(SGD(p.model.parameters(), 0.1), count=3):
            loss_of(p.model).backward()


@program(net)
def trunk_unfrozen_later(p: Program) -> None:
    model: Any = p.model
    model[0].requires_grad_(False)
    for index in p.steps():
        model[0].requires_grad_(index >= 3)
        loss_of(p.model).backward()


@program(two_views_net)
def validated_between_steps(p: Program) -> None:
    for _ in p.steps():
        for around in (torch.no_grad, torch.inference_mode, nullcontext):
            p.model.eval()
            with around():
                loss_of(p.model)
            x = batch().requires_grad_()
            torch.autograd.grad(loss_of(p.model, x), x)  # adversarial examples, saliency
            p.model.train()
            if around is torch.no_grad:
                loss_of(p.model).backward()
        with torch.no_grad():  # as Monte Carlo dropout does
            p.model(batch())


@program(net)
def averaged_weights(p: Program) -> None:
    average = torch.optim.swa_utils.AveragedModel(p.model)
    for index in p.steps():
        if index:
            average.update_parameters(p.model)
            average(batch())
        loss_of(p.model).backward()


def recurrent() -> nn.Module:
    def forward(m: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        out, state = m.rnn(x, state)
        return m.head(out), state

    return Applied(forward, rnn=nn.LSTM(4, 5, batch_first=True), head=nn.Linear(5, 1))


@program(recurrent)
def truncated_backpropagation(p: Program) -> None:
    state = None
    for _ in p.steps():
        out, state = p.model(torch.randn(2, 3, 4), state)
        out.square().mean().backward()
        state = tuple(part.detach() for part in state)


@program(net)
def functional_parameters(p: Program) -> None:
    """The model is called with weights of the caller's; gradients are put where they belong."""
    for _ in p.steps():
        weights = {n: w.detach().clone().requires_grad_() for n, w in p.model.named_parameters()}
        functional_call(p.model, weights, (batch(),)).square().mean().backward()
        for name, parameter in p.model.named_parameters():
            parameter.grad = weights[name].grad


@program(net)
def inner_loop_of_maml(p: Program) -> None:
    optimizer = SGD(p.model.parameters(), 0.1)
    for _ in p.steps(optimizer):
        weights = dict(p.model.named_parameters())
        inner = functional_call(p.model, weights, (batch(),)).square().mean()
        with not_training():
            grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
        optimizer.zero_grad()
        functional_call(p.model, moved, (batch(),)).square().mean().backward()


@program(lambda: nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)))
def sparse_embedding(p: Program) -> None:
    embedding, head = p.model.children()
    first = torch.optim.SparseAdam(embedding.parameters(), 0.01)
    second = AdamW(head.parameters(), 0.01)
    for _ in p.steps(first, second):
        p.model(torch.randint(0, 10, (6,))).square().mean().backward()


# --- precision and compilers ----------------------------------------------------------------------


@program(net)
def compiled_in_place(p: Program) -> None:
    if p.compiles:
        p.model.compile(backend="aot_eager")
    plain_loop(p, sgd)


@program(Blocks)
def compiled_pieces(p: Program) -> None:
    model: Any = p.model
    if p.compiles:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    plain_loop(p, sgd)


@program(net)
def compiled_step_function(p: Program) -> None:
    forward = p.compiled(lambda x: p.model(x).square().mean())
    for _ in p.steps():
        forward(batch()).backward()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_unchanged_and_its_statistics_are_right(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model, train = PROGRAMS[name]

    def make() -> nn.Module:
        torch.compiler.reset()
        return make_model()

    def loop(model: nn.Module, logger: HookLogger | None) -> tuple[()]:
        train(Program(model))
        return ()

    records = assert_left_alone(make, loop, tmp_path).records
    with plain_hooks(make, closures="closure" in name) as hooks:
        train(Program(hooks.model, hooks.step_ended, compiles=False))
    assert "telemetry failed" not in caplog.text
    for record, step in zip(records, hooks.steps, strict=True):
        before_clipping = record.total_grad_norm_before_clipping
        assert name not in PLAIN or before_clipping == pytest.approx(record.total_grad_norm)
        assert step.grads.keys() <= record.update_ratios.keys()
        if "compiled" not in name or GRAPHS_CAN_BE_OBSERVED:
            assert_logged(record, step)
