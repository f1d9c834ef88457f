"""What is known of a module by the name of its class."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Flat:
    """Where a curve is flat: at or below ``low``, at or above ``high``."""

    low: float
    high: float


_EXACT = Flat(low=-0.9985, high=0.9985)
_NEARLY = Flat(low=-0.94, high=0.94)

BOUNDED = {
    "Tanh": (_NEARLY, _EXACT),
    "RNN": (_NEARLY, _EXACT),
    "RNNCell": (_NEARLY, _EXACT),
    "Sigmoid": (Flat(low=0.06, high=0.94), Flat(low=0.0015, high=0.9985)),
    "Hardtanh": (_EXACT,),
    "Hardsigmoid": (Flat(low=0.0, high=0.9985),),
    "Softsign": (_NEARLY,),
}
"""Activations with two flat ends: where they begin, and where hardly any slope is left.

A gate that begins nearly closed (sigmoid of -5) is on the first, not on the second.
"""

LOOKUPS = frozenset(["Embedding", "EmbeddingBag"])
"""Their outputs have a scale of their own, which nothing before them explains."""

RESHAPING = frozenset(["Identity", "Flatten", "Unflatten", "ZeroPad2d", "PixelShuffle", "Upsample"])
DROPOUTS = frozenset(["Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"])
POOLING = frozenset(
    ["MaxPool1d", "MaxPool2d", "MaxPool3d", "AvgPool1d", "AvgPool2d", "AvgPool3d"]
    + [f"Adaptive{kind}Pool{n}d" for kind in ("Avg", "Max") for n in (1, 2, 3)]
)
UNBOUNDED = frozenset(
    [
        "ReLU",
        "LeakyReLU",
        "PReLU",
        "RReLU",
        "ReLU6",
        "GELU",
        "SiLU",
        "Mish",
        "ELU",
        "CELU",
        "SELU",
        "Softplus",
        "Hardswish",
        "GLU",
        "Softmax",
        "LogSoftmax",
    ]
)
"""Activations without two flat ends, and distributions, which have other reasons to be flat."""

LINEAR = frozenset(
    ["Linear", "Bilinear", "Conv1d", "Conv2d", "Conv3d", "LSTM", "GRU", "LSTMCell", "GRUCell"]
    + [f"ConvTranspose{n}d" for n in (1, 2, 3)]
)
NORMALIZATIONS = frozenset(
    [
        "BatchNorm1d",
        "BatchNorm2d",
        "BatchNorm3d",
        "SyncBatchNorm",
        "LayerNorm",
        "GroupNorm",
        "RMSNorm",
        "InstanceNorm1d",
        "InstanceNorm2d",
        "InstanceNorm3d",
    ]
)

STANDARD = (
    frozenset(BOUNDED) | LOOKUPS | RESHAPING | DROPOUTS | POOLING | UNBOUNDED | LINEAR
) | NORMALIZATIONS
"""Modules that return finite numbers for finite ones of usual size."""
