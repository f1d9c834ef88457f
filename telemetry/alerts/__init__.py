"""What a training fault looks like in the records: a detector for each kind of alert.

:mod:`~telemetry.alerts.baseline` remembers what a run's figures were, the detectors say what is
wrong at one step, and :mod:`~telemetry.alerts.engine` makes alerts of it.

A comment beside each threshold says where it comes from. "Tried 5 and 20" means: the runs of
``benchmarks/faultbench.py`` (seed 1) were judged again with each of these values, and no verdict
changed; a run that did change is named. "By eye" means that nothing else supports the value.
"""

from __future__ import annotations

from telemetry.alerts.configuration import default_rules, rules_from

__all__ = ["default_rules", "rules_from"]
