"""Rules: what a training fault looks like in the records, one file for each."""

from __future__ import annotations

from telemetry.alerts.configuration import default_rules, rules_from

__all__ = ["default_rules", "rules_from"]
