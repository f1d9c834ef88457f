"""Entry point ``tensorboard_plugins``, which TensorBoard loads when it starts."""

from __future__ import annotations

from tensorboard.plugins import base_plugin


class TelemetryLoader(base_plugin.TBLoader):  # type: ignore[misc]
    """Loader of the Telemetry page."""

    def load(self, context: base_plugin.TBContext) -> base_plugin.TBPlugin | None:
        if context.data_provider is None:
            return None
        # Late, so that TensorBoard starts faster.
        from telemetry.tensorboard_plugin.plugin import TelemetryPlugin

        return TelemetryPlugin(context)
