"""The C extension; everything else is in setup.cfg. Where it cannot be built, NumPy serves."""

import os
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Nothing here that changes the floating-point state of a process that loads it.
FLAGS = ["-std=gnu11", "-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"]

# One build serves all versions of Python from this one on; those without a GIL have no such builds.
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")


class BuildExtension(build_ext):
    def build_extension(self, ext: Extension) -> None:
        if self.compiler.compiler_type != "msvc":
            ext.extra_compile_args = FLAGS
        super().build_extension(ext)


extension = Extension(
    "telemetry.measure._native",
    ["telemetry/measure/_native.c"],
    depends=["telemetry/measure/dlpack.h"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")] if LIMITED else [],
    py_limited_api=LIMITED,
    optional=not os.environ.get("TELEMETRY_REQUIRE_NATIVE"),  # set for releases
)

setup(
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED else {},
)
