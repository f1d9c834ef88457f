"""Detectors of training faults, one for each kind of alert.

:mod:`~telemetry.alerts.baseline` keeps the run's own figures, each detector returns the fault of a
step, and :mod:`~telemetry.alerts.engine` reports alerts.

A comment at each threshold gives its evidence. "Tried 5 and 20": the runs of
``benchmarks/faultbench.py`` (seed 1) were judged again with these values, and no verdict changed; a
run with another verdict is named. "Chosen manually": there is no other evidence.
"""

from telemetry.alerts.configuration import default_rules as default_rules
from telemetry.alerts.configuration import rules_from as rules_from
