"""TensorBoard's own reader, with tags as they are without the groups of ours."""

from __future__ import annotations

from typing import Any

from tensorboard.backend.event_processing import event_accumulator

from telemetry.tag_names import plain


class EventAccumulator(event_accumulator.EventAccumulator):
    """Takes and gives ``loss`` and ``grad_norm/total``, whatever groups these are in."""

    def Tags(self) -> dict[str, Any]:  # noqa: N802 - overrides
        tags = super().Tags()
        return {k: [*map(plain, v)] if isinstance(v, list) else v for k, v in tags.items()}

    def Scalars(self, tag: str) -> Any:  # noqa: N802
        return super().Scalars(self._written("scalars", tag))

    def Tensors(self, tag: str) -> Any:  # noqa: N802
        return super().Tensors(self._written("tensors", tag))

    def SummaryMetadata(self, tag: str) -> Any:  # noqa: N802
        return super().SummaryMetadata(self._written("tensors", tag))

    def _written(self, kind: str, tag: str) -> str:
        return next((full for full in super().Tags()[kind] if plain(full) == tag), tag)
