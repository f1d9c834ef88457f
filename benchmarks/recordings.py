"""Ways to record training: telemetry's, that of tutorials, and those of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import tensorboard

from telemetry import HookLogger


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The work besides training."""

    after_step: Callable[[], None] = lambda: None
    finish: Callable[[], None] = lambda: None  # waits until all of it is written


Record = Callable[[nn.Module, Optimizer, Path], Recording]


def nothing(model: nn.Module, optimizer: Optimizer, log_dir: Path) -> Recording:
    return Recording()


def with_telemetry(
    model: nn.Module, optimizer: Optimizer, log_dir: Path, **options: Any
) -> Recording:
    return Recording(finish=HookLogger(model, log_dir, **options).flush)


def naively(model: nn.Module, optimizer: Optimizer, log_dir: Path) -> Recording:
    """``add_histogram`` of the same tensors, as tutorials show it; no images, no alerts."""
    writer = tensorboard.SummaryWriter(str(log_dir))
    step = 0

    def observe(name: str, output: Tensor) -> None:
        writer.add_histogram(f"activation/{name}", output.detach(), step)
        output.register_hook(
            lambda grad: writer.add_histogram(f"activation_grad/{name}", grad, step)
        )

    for name, module in model.named_modules():
        if not any(module.children()):
            module.register_forward_hook(lambda _, __, output, name=name: observe(name, output))

    def after_step() -> None:
        nonlocal step
        for name, parameter in model.named_parameters():
            writer.add_histogram(f"weight/{name}", parameter.detach(), step)
            writer.add_histogram(f"grad/{name}", parameter.grad, step)
        step += 1

    return Recording(after_step=after_step, finish=writer.flush)


def start_wandb(folder: Path) -> Any:
    """A run without network access."""
    wandb: Any = import_module("wandb")
    settings = wandb.Settings(silent=True, console="off", disable_git=True)
    return wandb.init(mode="offline", dir=str(folder), settings=settings, reinit="finish_previous")


def with_wandb(model: nn.Module, optimizer: Optimizer, log_dir: Path) -> Recording:
    """Histograms of parameters and their gradients; not the time of wandb's own process."""
    log_dir.mkdir()
    run = start_wandb(log_dir)
    run.watch(model, log="all", log_freq=1)
    return Recording(after_step=lambda: run.log({"recorded": 1}))


def with_ignite(model: nn.Module, optimizer: Optimizer, log_dir: Path) -> Recording:
    """Histograms of parameters and their gradients."""
    Engine, Events = (getattr(import_module("ignite.engine"), n) for n in ("Engine", "Events"))  # noqa: N806
    handlers = import_module("ignite.handlers.tensorboard_logger")
    engine = Engine(lambda engine, batch: None)
    logger = handlers.TensorboardLogger(log_dir=str(log_dir))
    both = [handlers.GradsHistHandler(model), handlers.WeightsHistHandler(model)]

    def after_step() -> None:
        engine.state.iteration += 1
        for handler in both:
            handler(engine, logger, Events.ITERATION_COMPLETED)

    return Recording(after_step=after_step, finish=logger.writer.flush)


def with_composer(model: nn.Module, optimizer: Optimizer, log_dir: Path) -> Recording:
    """Moments of inputs and outputs, gradient norms; nothing is written.

    ActivationMonitor takes the samples of a batch for separate outputs, and measures each.
    """
    callbacks = import_module("composer.callbacks")
    activations = callbacks.ActivationMonitor(interval="25ba", only_log_wandb=False)
    gradients = callbacks.OptimizerMonitor(log_optimizer_metrics=False, batch_log_interval=1)
    logger = SimpleNamespace(log_metrics=lambda metrics: None)
    state = SimpleNamespace(
        model=model,
        optimizers=[optimizer],
        fsdp_enabled=False,
        timestamp=SimpleNamespace(batch=SimpleNamespace(value=0)),
    )
    activations.create_module_names(model)
    activations.attach_forward_hooks(state, logger)
    return Recording(after_step=lambda: gradients.batch_end(state, logger))


RECORDINGS: Mapping[str, Record] = {
    "bare": nothing,
    "only norms": partial(with_telemetry, every_n_steps=1_000_000),  # after step 0 none is due
    "every step": partial(with_telemetry, every_n_steps=1),
    "same, no images": partial(with_telemetry, every_n_steps=1, measure="!images"),
    "same as wandb": partial(
        with_telemetry,
        every_n_steps=1,
        measure=("gradients", "weights"),
    ),
    "add_histogram": naively,
}

PEERS: Mapping[str, tuple[str, Record]] = {
    "wandb.watch": ("wandb", with_wandb),
    "ignite": ("ignite.engine", with_ignite),
    "composer": ("composer.callbacks", with_composer),
}


def installed_recordings() -> dict[str, Record]:
    """All recordings that are available; prints which libraries are not installed."""
    recordings = dict(RECORDINGS)
    for name, (module, record) in PEERS.items():
        try:
            import_module(module)
        except ImportError as missing:
            print(f"without {name}: {missing}")
        else:
            recordings[name] = record
    return recordings
