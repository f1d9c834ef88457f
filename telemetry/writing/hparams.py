"""Hyperparameters for the HParams dashboard, in the same run as all other values."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from telemetry.plain_text import check_text, type_of
from telemetry.untrusted import MAX_INTEGER

Hyperparameter = bool | int | float | str | list[Any] | tuple[Any, ...] | None

_KINDS = {
    "bool_value": api_pb2.DATA_TYPE_BOOL,
    "string_value": api_pb2.DATA_TYPE_STRING,
    "number_value": api_pb2.DATA_TYPE_FLOAT64,
}


def check(hyperparameters: object, metrics: object) -> None:
    """Raise TypeError or ValueError for what cannot be written."""
    if not isinstance(hyperparameters, Mapping):
        raise TypeError(f"hparams({hyperparameters!r}): must be a dict of values by name")
    for name, value in hyperparameters.items():
        check_text(f"hparams({{{name!r}: ...}}): a name", name)
        if not isinstance(value, bool | int | float | str | list | tuple | None):
            raise TypeError(
                f"hparams({name}={reprlib.repr(value)}): must be a number, bool, string, list, "
                f"tuple or None, not {type_of(value)}; pass str(value), or leave it out"
            )
        check_text(f"hparams({name}={reprlib.repr(value)}): it", str(value))
    if isinstance(metrics, str):
        raise TypeError(
            f"hparams(metrics={metrics!r}): must be several tags, such as [{metrics!r}]"
        )


def plain_value(value: Hyperparameter) -> str | int | float | bool:
    """Return a value as the run log has it: lists and None are texts."""
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return float(value)
    return value if isinstance(value, str | int | float) else str(value)


def session_value(hyperparameters: Mapping[str, Hyperparameter]) -> bytes:
    """Return the hyperparameters of this run, to write once."""
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for name, value in hyperparameters.items():
        kind = _kind(value)
        setattr(start.hparams[name], kind, str(value) if kind == "string_value" else value)
    content = plugin_data_pb2.HParamsPluginData(session_start_info=start)
    return _value(metadata.SESSION_START_INFO_TAG, content)


def experiment_value(
    hyperparameters: Mapping[str, Hyperparameter], metrics: Iterable[str]
) -> bytes:
    """Return the columns of the dashboard's table, to write once."""
    infos = [
        api_pb2.HParamInfo(name=name, type=_KINDS[_kind(value)])
        for name, value in hyperparameters.items()
    ]
    names = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=metric)) for metric in metrics]
    experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=names)
    content = plugin_data_pb2.HParamsPluginData(experiment=experiment)
    return _value(metadata.EXPERIMENT_TAG, content)


def _kind(value: Hyperparameter) -> str:
    if isinstance(value, bool):
        return "bool_value"
    return "number_value" if isinstance(value, int | float) else "string_value"


def _value(tag: str, content: plugin_data_pb2.HParamsPluginData) -> bytes:
    described = metadata.create_summary_metadata(content)
    value = Summary.Value(tag=tag, metadata=described, tensor=metadata.NULL_TENSOR)
    return bytes(Summary(value=[value]).SerializeToString())
