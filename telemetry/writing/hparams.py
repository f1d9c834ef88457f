"""Hyperparameters for the HParams dashboard, in the same run as everything else."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from google.protobuf.struct_pb2 import Value
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary, SummaryMetadata
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from telemetry.plain_text import check_text

Hyperparameter = bool | int | float | str


def values_of(
    hyperparameters: Mapping[str, Hyperparameter], metrics: Iterable[str] = ("loss",)
) -> list[Summary.Value]:
    """The values to write once per run.

    Args:
        hyperparameters: Values by name.
        metrics: Tags of scalars to show beside them.

    Raises:
        TypeError: An argument or a value has another type.
        ValueError: A name or a string cannot be encoded in UTF-8.
    """
    if not isinstance(hyperparameters, Mapping):
        raise TypeError(f"hparams({hyperparameters!r}): must be a dict of values by name")
    if isinstance(metrics, str):
        raise TypeError(
            f"hparams(metrics={metrics!r}): must be several tags, such as [{metrics!r}]"
        )
    for name, value in hyperparameters.items():
        check_text(f"hparams({{{name!r}: ...}}): a name", name)
        if isinstance(value, str):
            check_text(f"hparams({name}={value!r}): it", value)
        if not isinstance(value, bool | int | float | str):
            raise TypeError(
                f"hparams({name}={value!r}): must be a number, a bool or a string, "
                f"not {type(value).__qualname__}"
            )
    return [_experiment(hyperparameters, metrics), _session_start(hyperparameters)]


def _experiment(
    hyperparameters: Mapping[str, Hyperparameter], metrics: Iterable[str]
) -> Summary.Value:
    experiment = api_pb2.Experiment(
        hparam_infos=[
            api_pb2.HParamInfo(name=name, type=_type(value))
            for name, value in hyperparameters.items()
        ],
        metric_infos=[
            api_pb2.MetricInfo(name=api_pb2.MetricName(tag=metric)) for metric in metrics
        ],
    )
    content = plugin_data_pb2.HParamsPluginData(experiment=experiment)
    return _value(metadata.EXPERIMENT_TAG, content)


def _session_start(hyperparameters: Mapping[str, Hyperparameter]) -> Summary.Value:
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for name, value in hyperparameters.items():
        start.hparams[name].CopyFrom(_proto(value))
    content = plugin_data_pb2.HParamsPluginData(session_start_info=start)
    return _value(metadata.SESSION_START_INFO_TAG, content)


def _value(tag: str, content: plugin_data_pb2.HParamsPluginData) -> Summary.Value:
    content.version = metadata.PLUGIN_DATA_VERSION
    plugin_data = SummaryMetadata.PluginData(
        plugin_name=metadata.PLUGIN_NAME, content=content.SerializeToString()
    )
    return Summary.Value(
        tag=tag,
        metadata=SummaryMetadata(plugin_data=plugin_data, data_class=DATA_CLASS_TENSOR),
        tensor=metadata.NULL_TENSOR,
    )


def _type(value: Hyperparameter) -> int:
    if isinstance(value, bool):
        return int(api_pb2.DATA_TYPE_BOOL)
    return int(api_pb2.DATA_TYPE_STRING if isinstance(value, str) else api_pb2.DATA_TYPE_FLOAT64)


def _proto(value: Hyperparameter) -> Value:
    if isinstance(value, bool):
        return Value(bool_value=value)
    return Value(string_value=value) if isinstance(value, str) else Value(number_value=value)
