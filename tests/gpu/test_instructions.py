"""Instructions per element of the CUDA kernels, which bound their speed: none may be added."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from telemetry.measure import nvrtc
from telemetry.measure.nvrtc import NvrtcError

# Of sm_90, by NVRTC 13.0; `python benchmarks/instructions.py` prints them.
SLOTS = {
    "float32": (18.5, 15.4, 15.4, 18.6, 22.0, 29.5),
    "bfloat16": (16.1, 12.7, 12.7, 16.1, 18.2, 21.5),
    "float16": (15.9, 12.7, 12.6, 15.9, 19.4, 21.3),
}
# What the same compiler may add, and any other.
SAME_COMPILER, OTHER_COMPILER = 1.01, 1.15


@pytest.fixture(scope="module")
def instructions() -> Any:
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend("benchmarks")
        module = import_module("instructions")
    try:
        module.disassembler()
        nvrtc._library()
    except (FileNotFoundError, NvrtcError) as error:
        pytest.skip(str(error))
    return module


def test_no_kernel_takes_more_instructions_than_the_table_says(instructions: Any) -> None:
    most = SAME_COMPILER if nvrtc._version() == "13.0" else OTHER_COMPILER
    for dtype, found in instructions.measured_slots().items():
        for (layout, slots), known in zip(found.items(), SLOTS[dtype], strict=True):
            assert slots <= known * most, f"{dtype}, {layout}: update the table if it must be"


def test_instruction_slots_are_counted_on_the_ordinary_path_of_the_hot_loop(
    instructions: Any,
) -> None:
    listing = """
.L_x_0:
        /*0000*/                   LDG.E R0, [R2] ;
        /*0010*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0020*/                   ATOMS.POPC.INC.32 RZ, [R0] ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
        /*0040*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0050*/                   ATOMS.POPC.INC.32 RZ, [R0] ;
        /*0060*/               @P3 ATOMS.POPC.INC.32 RZ, [R1] ;
        /*0070*/               @P2 BRA `(.L_x_3) ;
        /*0080*/                   DADD R4, R4, R6 ;
.L_x_3:
        /*0090*/               @P0 BRA `(.L_x_0) ;
        /*00a0*/                   EXIT ;
"""
    # Two loads and branches, two elements, the sum, and the loop's end.
    assert instructions.slots_per_element(instructions._parsed(listing)) == 7 / 2
