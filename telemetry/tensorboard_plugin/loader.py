"""Entry point ``tensorboard_plugins``, which TensorBoard loads when it starts."""

from __future__ import annotations

import argparse

from tensorboard.plugins import base_plugin

from telemetry.events.page_format import PLUGIN_NAME


class TelemetryLoader(base_plugin.TBLoader):  # type: ignore[misc]
    """Make TensorBoard keep every step of the page's data, unless the user sets another number."""

    def fix_flags(self, flags: argparse.Namespace) -> None:
        # By default TensorBoard keeps 100 steps of a tag, or 10 with the slow loader.
        if getattr(flags, "samples_per_plugin", None) is not None:
            flags.samples_per_plugin.setdefault(PLUGIN_NAME, 0)

    def load(self, context: base_plugin.TBContext) -> base_plugin.TBPlugin | None:
        if context.data_provider is None:
            return None
        # Late, so that TensorBoard starts faster.
        from telemetry.tensorboard_plugin.plugin import TelemetryPlugin

        return TelemetryPlugin(context)
