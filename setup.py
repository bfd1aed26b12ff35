"""Builds the two extensions. Everything else about the package is in pyproject.toml.

The objects are built for the baseline instruction set of the machine's architecture. Only the kernel
files named in ISA_FLAGS are compiled for more, and their code is entered after a check at run time:
a wheel built here never dies of an illegal instruction elsewhere.
"""

import platform
from pathlib import Path
from typing import Any

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

CSRC = "aio_csrc"
ARCHITECTURE = {"amd64": "x86_64", "arm64": "aarch64"}.get(
    platform.machine().lower(), platform.machine().lower()
)

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
ISA_FLAGS: dict[str, list[str]] = {
    "adam_avx2.cpp": AVX2,
    "adam_avx512.cpp": AVX512,
    "rules_avx2.cpp": AVX2,
    "rules_avx512.cpp": AVX512,
}
OF_ARCHITECTURE = {"avx2": "x86_64", "avx512": "x86_64", "neon": "aarch64"}
"""What a file whose name ends in an instruction set is built for."""
COMMON_FLAGS = ["-O3", "-g1", "-Wall", "-Wextra", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]


def sources(*patterns: str) -> list[str]:
    found = sorted(str(path) for pattern in patterns for path in Path(CSRC).glob(pattern))
    return [path for path in found if OF_ARCHITECTURE.get(isa_of(path), ARCHITECTURE) == ARCHITECTURE]


def isa_of(path: str) -> str:
    return Path(path).stem.rpartition("_")[2]


def extension(name: str, *patterns: str) -> Pybind11Extension:
    headers = sorted(str(path) for path in Path(CSRC).rglob("*.h"))
    return Pybind11Extension(
        f"offload.{name}",
        sources(*patterns),
        include_dirs=[CSRC],
        depends=headers,
        cxx_std=20,
        extra_compile_args=COMMON_FLAGS,
        extra_link_args=["-pthread"],
    )


class BuildExtensions(build_ext):
    """build_ext that gives the files of ISA_FLAGS their own instruction-set flags."""

    def build_extensions(self) -> None:
        compile_one = self.compiler._compile

        def compile_with_isa(
            obj: str, src: str, ext: str, cc_args: Any, extra: list[str], pp_opts: Any
        ) -> None:
            compile_one(obj, src, ext, cc_args, [*extra, *ISA_FLAGS.get(Path(src).name, [])], pp_opts)

        self.compiler._compile = compile_with_isa
        super().build_extensions()


ParallelCompile("NPY_NUM_BUILD_JOBS", max=8).install()  # a compiler for each core
setup(
    ext_modules=[
        extension("_aio", "util/*.cpp", "io/*.cpp", "bindings/aio.cpp"),
        extension("_adam", "util/*.cpp", "optim/*.cpp", "bindings/adam.cpp", "bindings/rules.cpp"),
    ],
    cmdclass={"build_ext": BuildExtensions},
)
