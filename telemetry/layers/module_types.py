"""Properties of modules by the name of their class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from telemetry.records.buckets import bucket_of
from telemetry.records.moments import finite_of
from telemetry.records.rows import Rows
from telemetry.records.sketch import Sketch
from telemetry.threads import without_locks


@without_locks
@dataclass(frozen=True, kw_only=True)
class Flat:
    """Outputs at which a function is flat: at most ``low``, and at least ``high``.

    The limits have the resolution of a sketch's buckets.
    """

    low: float = -math.inf
    high: float = math.inf

    @cached_property
    def ends(self) -> tuple[int, int]:
        """Last bucket of the low end and first one of the high end; an absent end has no bucket."""
        return bucket_of(self.low), bucket_of(self.high)

    def share(self, outputs: Sketch) -> float:
        """Return the share of the finite outputs in this range; 0 without any."""
        low, high = self.ends
        beyond = (outputs.buckets <= low) | (outputs.buckets >= high)
        return float(outputs.counts[beyond].sum() / (outputs.finite_count or 1))


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """An activation function with a flat end."""

    # Range where the slope is at most about a quarter of the largest: four such functions in a row
    # pass less than 1 % of a gradient.
    flat: Flat
    # Range where the slope is close to zero; None if it equals ``flat``. A gate that begins nearly
    # closed (sigmoid of -5) is flat, but not at its flattest.
    flattest: Flat | None = None


_TANH = Bounded(flat=Flat(low=-7 / 8, high=7 / 8), flattest=Flat(low=-0.9985, high=0.9985))

# By the name of the module's class. An ``RNN`` has tanh by default.
BOUNDED: Mapping[str, Bounded] = {
    # 1 - y^2 is 15/64 at 7/8, and less than 1/256 where bfloat16 rounds to 1.
    "Tanh": _TANH,
    "RNN": _TANH,
    "RNNCell": _TANH,
    # tanh(x) = 2 sigmoid(2 x) - 1: the same x, up to the resolution of the buckets.
    "Sigmoid": Bounded(flat=Flat(low=0.06, high=15 / 16), flattest=Flat(low=0.0015, high=0.9985)),
    # (1 - |y|)^2 is 1/4 at 1/2.
    "Softsign": Bounded(
        flat=Flat(low=-1 / 2, high=1 / 2), flattest=Flat(low=-15 / 16, high=15 / 16)
    ),
    "Hardtanh": Bounded(flat=Flat(low=-0.9985, high=0.9985)),
    "Hardsigmoid": Bounded(flat=Flat(low=0.0, high=0.9985)),
    # Its zeros are those of any ReLU.
    "ReLU6": Bounded(flat=Flat(high=6.0)),
}

# Functions that are flat at both ends: an output of zero does not mean that a unit is off.
TWO_SIDED = frozenset(name for name, function in BOUNDED.items() if function.flat.low > -math.inf)


def saturated_shares(type_names: Sequence[str], outputs: Rows) -> NDArray[np.float64]:
    """Return the share of each row's finite outputs where the activation function is flat.

    ``type_names`` are the names of the modules' classes, ``[rows]``. NaN if the class is not in
    :data:`BOUNDED`, or no output is finite.
    """
    shares, finite = np.full(len(outputs), math.nan), finite_of(outputs)
    for row, name in enumerate(type_names):
        if name in BOUNDED and finite[row]:
            shares[row] = BOUNDED[name].flat.share(Sketch.of_row(outputs, row))
    return shares


# Modules whose scale of outputs does not depend on their inputs.
LOOKUPS = frozenset(["Embedding", "EmbeddingBag"])

RESHAPING = frozenset(["Identity", "Flatten", "Unflatten", "ZeroPad2d", "PixelShuffle", "Upsample"])
DROPOUTS = frozenset(["Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"])
POOLING = frozenset(
    ["MaxPool1d", "MaxPool2d", "MaxPool3d", "AvgPool1d", "AvgPool2d", "AvgPool3d"]
    + [f"Adaptive{kind}Pool{n}d" for kind in ("Avg", "Max") for n in (1, 2, 3)]
)
# Activations without two flat ends, and distributions, which are flat for other reasons.
UNBOUNDED = frozenset(
    ["ReLU", "LeakyReLU", "PReLU", "RReLU", "GELU", "SiLU", "Mish", "ELU", "CELU", "SELU"]
).union(["Softplus", "Hardswish", "GLU", "Softmax", "LogSoftmax"])

CONVOLUTIONS = frozenset(["Conv1d", "Conv2d", "Conv3d"])

# Modules whose outputs are proportional to their inputs.
AFFINE = CONVOLUTIONS | frozenset(["Linear", *(f"ConvTranspose{n}d" for n in (1, 2, 3))])

LINEAR = AFFINE | frozenset(["Bilinear", "LSTM", "GRU", "LSTMCell", "GRUCell"])
NORMALIZATIONS = frozenset(
    ["SyncBatchNorm", "LayerNorm", "GroupNorm", "RMSNorm"]
    + [f"{kind}Norm{n}d" for kind in ("Batch", "Instance") for n in (1, 2, 3)]
)

# Modules that return finite numbers for finite inputs of usual size.
STANDARD = (
    frozenset(BOUNDED) | LOOKUPS | RESHAPING | DROPOUTS | POOLING | UNBOUNDED | LINEAR
) | NORMALIZATIONS
