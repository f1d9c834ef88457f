"""Instructions per element of the CUDA kernels, and the speed that they allow. No GPU is needed.

    python benchmarks/instructions.py [sm_90]

NVRTC compiles each kernel, ``nvdisasm`` shows its machine code, and the issue slots of the hot
loop's ordinary path are counted: of finite values of ordinary size. Four kernels that were measured
on an H100 agree on 5.25 to 5.5 billion warp instructions per second and multiprocessor where
instructions bound them; so the share of a copy's speed is predicted to some 10 %.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from telemetry.measure import nvrtc

# Of an H100: multiprocessors, warp instructions of each per second, bytes a copy reads and writes
# per second, and the largest share of that which any kernel reached.
PROCESSORS, ISSUED_PER_S, COPY_BYTES_PER_S, LARGEST_SHARE = 132, 5.4e9, 2980e9, 0.95

LAYOUTS = {
    "flat": "measure_4",
    "flat, two powers": "measure_2",
    "many, two powers": "measure_many_2",
    "units last, whole vectors": "measure_wide_4",
    "units last, others": "measure_last_4",
    "units in the middle": "measure_middle_4",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_FUNCTION = re.compile(r"^\.text\.(\w+):", re.MULTILINE)
_LINE = re.compile(r"^(\.L_x_\d+):|^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
_BRANCH = re.compile(r"(@!?U?P\w+ )?(?:BRA|JMP)(?:\.\w+)*\b.*?`\((\.L_x_\d+)\)")


class Instruction(NamedTuple):
    """One instruction of a function; ``next`` are the places of those that may follow."""

    text: str
    next: tuple[int, ...]


def disassembler() -> str:
    """The path of ``nvdisasm``: of the package ``nvidia-cuda-nvdisasm``, or the system's.

    Raises:
        FileNotFoundError: It is not installed.
    """
    folder = Path(sysconfig.get_path("purelib")) / "nvidia"
    found = [*map(str, folder.glob("*/bin/nvdisasm*")), shutil.which("nvdisasm")]
    if not found[0]:
        raise FileNotFoundError("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    return found[0]


def functions_of(cubin: bytes) -> dict[str, list[Instruction]]:
    """The instructions of each kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        text = subprocess.run(
            [disassembler(), "-c", file.name], check=True, capture_output=True, text=True
        ).stdout
    finally:
        Path(file.name).unlink()
    _, *parts = _FUNCTION.split(text)
    return {name: _parsed(body) for name, body in zip(parts[::2], parts[1::2], strict=True)}


def _parsed(body: str) -> list[Instruction]:
    texts: list[str] = []
    places: dict[str, int] = {}
    for label, _, text in _LINE.findall(body):
        if label:
            places[label] = len(texts)
        else:
            texts.append(text)
    found = []
    for place, text in enumerate(texts):
        branch = _BRANCH.match(text)
        following = [place + 1]
        if branch:
            # A branch of a whole warp that differs, or one that has a condition, may go on.
            conditional = branch[1] or "BRA.DIV" in text or re.search(r"BRA U?!?U?P\d", text)
            following = [*([place + 1] if conditional else []), places[branch[2]]]
        elif re.match(r"(EXIT|RET|BRX)\b", text):
            following = []
        found.append(Instruction(text, tuple(n for n in following if n < len(texts))))
    return found


def slots_per_element(function: list[Instruction]) -> float:
    """Issue slots of the hot loop's ordinary path, for each element that it counts.

    The hot loop counts the most elements in the histogram in one round without inner loops; its
    ordinary path also adds the most sums, and is the shortest one that does.
    """
    rounds = [
        _ordinary_path(function, head, end)
        for end, instruction in enumerate(function)
        for head in instruction.next
        if head <= end
    ]
    elements, _, slots = max(rounds)
    return -slots / elements


_COUNTS, _ADDS = (re.compile(rf"(@\S+ )?{name}\b") for name in ("ATOMS", "DADD"))


def _ordinary_path(function: list[Instruction], head: int, end: int) -> tuple[int, int, int]:
    """The most elements counted between two places, sums added, and minus the fewest slots."""
    # Slots by the earlier counts and sums.
    reached: dict[int, dict[tuple[int, int], int]] = {head: {(0, 0): 0}}
    for place in range(head, end + 1):
        text, following = function[place]
        counts, adds = bool(_COUNTS.match(text)), bool(_ADDS.match(text))
        for (elements, sums), slots in reached.get(place, {}).items():
            key = elements + counts, sums + adds
            for later in following:
                if place < later <= end:
                    known = reached.setdefault(later, {})
                    known[key] = min(known.get(key, sys.maxsize), slots + 1)
    return max((*key, -slots - 1) for key, slots in reached.get(end, {(0, 0): 0}).items())


def predicted_share(slots: float, itemsize: int) -> float:
    """Share of a copy's speed on an H100."""
    elements_per_s = PROCESSORS * ISSUED_PER_S * 32 / slots
    return min(elements_per_s * itemsize / COPY_BYTES_PER_S, LARGEST_SHARE)


def measured_slots(architecture: str = "sm_90") -> Mapping[str, Mapping[str, float]]:
    """Issue slots per element by the name of the dtype and by layout."""
    found = {}
    for dtype in DTYPES:
        functions = functions_of(nvrtc.compile_kernels(dtype, architecture))
        name = str(dtype).removeprefix("torch.")
        found[name] = {
            layout: slots_per_element(functions[kernel])
            for layout, kernel in LAYOUTS.items()
            if kernel in functions
        }
    return found


def main() -> None:
    architecture = sys.argv[1] if len(sys.argv) > 1 else "sm_90"
    print(f"{architecture}, NVRTC {nvrtc._version()}: issue slots per element, share of a copy")
    print(f"{'':27}", *(f"{str(dtype).removeprefix('torch.'):>14}" for dtype in DTYPES))
    slots = measured_slots(architecture)
    for layout in LAYOUTS:
        cells = []
        for dtype in DTYPES:
            found = slots[str(dtype).removeprefix("torch.")].get(layout)
            share = found and predicted_share(found, dtype.itemsize)
            cells.append(f"{found:7.1f} {share:6.0%}" if found else "")
        print(f"{layout:27}", *(f"{cell:>14}" for cell in cells))


if __name__ == "__main__":
    main()
