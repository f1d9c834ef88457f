"""The loss that a model returns, as those of Transformers do when they are given labels."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from telemetry.capture.hooks import Inert


class ReturnedLoss(Inert):
    """A hook that keeps the item ``"loss"`` of what a model returns in training.

    Compiled models show no loss.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._losses: list[Tensor] = []
        self._are_shares = False
        self.handle: RemovableHandle = model.register_forward_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: Any, named: Mapping[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        loss = output.get("loss") if isinstance(output, Mapping) else None
        # A module that shares its hooks with the model is a copy, as DataParallel makes.
        if isinstance(loss, Tensor) and loss.numel() == 1 and module is self._model():
            # Not a copy: Trainer multiplies it in place by the number of ranks.
            self._losses.append(loss.detach())
            self._are_shares = named.get("num_items_in_batch") is not None

    def of_step(self) -> Tensor | None:
        """The loss of all micro-batches since the last call, as ``Trainer`` adds them up.

        A model that is told how many items all of them have returns its share of their mean.
        """
        losses, self._losses = self._losses, []
        if not losses:
            return None
        total = torch.stack([loss.reshape(()) for loss in losses]).sum()
        return total if self._are_shares else total / len(losses)
