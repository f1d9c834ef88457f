"""Puts one stub where a PyTorch wheel looks for all CUDA libraries: ``cuda_stubs.py torch/lib``.

PyTorch loads them when it is imported, and they take several GB. Each function of the stub says
that there is no device, so PyTorch runs on the CPU. Needs gcc and readelf.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

LIBRARY = re.compile(r"NEEDED.*\[(lib(?:cu|nv|nccl)\w*\.so\.\d+)\]")
FUNCTION = re.compile(r" UND (_*(?:cu|nv|nccl)\w+)(?:@(\S+))?")
NO_DEVICE = 100  # cudaErrorNoDevice

folder = Path(sys.argv[1])
files = [*folder.glob("*.so"), *folder.parent.glob("*.so")]
read = subprocess.check_output(["readelf", "-W", "-d", "--dyn-syms", *files], text=True)
libraries = set(LIBRARY.findall(read)) - {file.name for file in folder.iterdir()}
if not libraries:
    sys.exit()  # a build for the CPU alone
functions: defaultdict[str, set[str]] = defaultdict(set)  # of each version of a symbol
for name, version in FUNCTION.findall(read):
    functions[version].add(name)
source = "".join(
    f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in set().union(*functions.values())
)
(folder / "versions").write_text(
    "".join(f"{v} {{ {'; '.join(names)}; }};\n" for v, names in functions.items() if v)
)
build = ["gcc", "-shared", "-w", f"-Wl,--version-script={folder / 'versions'}", "-xc", "-"]
subprocess.run([*build, "-o", folder / "stub.so"], input=source, text=True, check=True)
for library in libraries:
    (folder / library).symlink_to("stub.so")
