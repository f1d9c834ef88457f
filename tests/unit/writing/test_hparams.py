"""Values for the HParams dashboard."""

from __future__ import annotations

import pytest
from tensorboard.plugins.hparams import metadata

from telemetry.writing import hparams
from tests.helpers.serialized import parsed


def test_values_of_all_types_are_kept() -> None:
    given = {"lr": 0.1, "layers": 3, "norm": True, "optimizer": "sgd"}
    experiment, start = map(parsed, hparams.values_of(given, ["loss", "accuracy"]))
    content = metadata.parse_session_start_info_plugin_data(start.metadata.plugin_data.content)
    assert content.hparams["lr"].number_value == 0.1
    assert content.hparams["layers"].number_value == 3
    assert content.hparams["norm"].bool_value is True
    assert content.hparams["optimizer"].string_value == "sgd"
    written = metadata.parse_experiment_plugin_data(experiment.metadata.plugin_data.content)
    assert [info.name for info in written.hparam_infos] == list(given)
    assert [info.name.tag for info in written.metric_infos] == ["loss", "accuracy"]


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"hparams\(layers=\{1\}\): must be a number"):
        hparams.session_value({"layers": {1}})  # type: ignore[dict-item]
