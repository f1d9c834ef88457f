"""Hyperparameters for the HParams dashboard, in the same run as all other values."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from telemetry.plain_text import check_text

Hyperparameter = bool | int | float | str

_KINDS = {
    "bool_value": api_pb2.DATA_TYPE_BOOL,
    "string_value": api_pb2.DATA_TYPE_STRING,
    "number_value": api_pb2.DATA_TYPE_FLOAT64,
}


def values_of(hyperparameters: Mapping[str, Hyperparameter], metrics: Iterable[str]) -> list[bytes]:
    session = session_value(hyperparameters)
    return [experiment_value(hyperparameters, metrics), session]


def session_value(hyperparameters: Mapping[str, Hyperparameter]) -> bytes:
    """Return the hyperparameters of this run, to write once; raise TypeError or ValueError."""
    _check(hyperparameters)
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for name, value in hyperparameters.items():
        setattr(start.hparams[name], _kind(value), value)
    content = plugin_data_pb2.HParamsPluginData(session_start_info=start)
    return _value(metadata.SESSION_START_INFO_TAG, content)


def experiment_value(
    hyperparameters: Mapping[str, Hyperparameter], metrics: Iterable[str]
) -> bytes:
    """Return the columns of the dashboard's table, to write once; parameters must be checked."""
    if isinstance(metrics, str):
        raise TypeError(
            f"hparams(metrics={metrics!r}): must be several tags, such as [{metrics!r}]"
        )
    infos = [
        api_pb2.HParamInfo(name=name, type=_KINDS[_kind(value)])
        for name, value in hyperparameters.items()
    ]
    names = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=metric)) for metric in metrics]
    experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=names)
    content = plugin_data_pb2.HParamsPluginData(experiment=experiment)
    return _value(metadata.EXPERIMENT_TAG, content)


def _check(hyperparameters: object) -> None:
    if not isinstance(hyperparameters, Mapping):
        raise TypeError(f"hparams({hyperparameters!r}): must be a dict of values by name")
    for name, value in hyperparameters.items():
        check_text(f"hparams({{{name!r}: ...}}): a name", name)
        if isinstance(value, str):
            check_text(f"hparams({name}={value!r}): it", value)
        if not isinstance(value, bool | int | float | str):
            raise TypeError(
                f"hparams({name}={value!r}): must be a number, a bool or a string, "
                f"not {type(value).__qualname__}"
            )


def _kind(value: Hyperparameter) -> str:
    if isinstance(value, bool):
        return "bool_value"
    return "string_value" if isinstance(value, str) else "number_value"


def _value(tag: str, content: plugin_data_pb2.HParamsPluginData) -> bytes:
    described = metadata.create_summary_metadata(content)
    value = Summary.Value(tag=tag, metadata=described, tensor=metadata.NULL_TENSOR)
    return bytes(Summary(value=[value]).SerializeToString())
