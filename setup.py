"""Builds the native CPU library beside the Python package. Without a C++ compiler the package installs without it."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

FOLDER = Path("kvquant_kernels") / "cpu" / "native"  # no package, so that no scan takes the library for a module
SOURCES = Path(__file__).parent.resolve() / "kernels" / FOLDER
LIBRARY = "libkvquant_cpu.so"

# No -ffast-math, which would switch the whole process to flushing denormals; no -march=native, since wheels travel.
# -Wno-(maybe-)uninitialized: GCC 12 warns about its own AVX512 headers.
FLAGS = (
    "-O3 -std=c++17 -fPIC -fopenmp -fno-math-errno -fno-trapping-math "
    "-fvisibility=hidden -Wall -Wextra -Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized"
).split()
VARIANTS = {
    "x86_64": {
        "v2": ["-march=x86-64-v2", "-DLANES=4"],
        "v3": ["-march=x86-64-v3", "-DLANES=8"],
        "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512", "-DLANES=16"],
        "v4_vnni": ["-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512", "-DLANES=16", "-DKVQ_VNNI=1"],
    },
}
GENERIC = {"generic": ["-DLANES=4"]}


def find_compiler() -> str | None:
    return os.environ.get("CXX") or next((cxx for cxx in ("g++", "clang++", "c++") if shutil.which(cxx)), None)


def build_library(compiler: str, target: Path, extra: list[str], machine: str = platform.machine()) -> None:
    """Compiles every variant and links them. OpenMP's symbols stay open: they are those of torch's own runtime.

    `compiler` is a command, with options or not.
    """
    machine, command = {"AMD64": "x86_64"}.get(machine, machine), shlex.split(compiler)
    jobs = {"dispatch": ["dispatch.cpp"]}
    for name, flags in VARIANTS.get(machine, GENERIC).items():
        variant = [f"-DKVQ_VARIANT={name}", *flags]
        jobs[f"attend_{name}"] = ["attend.cpp", "-ffp-contract=fast", *variant]
        jobs[f"seal_{name}"] = ["seal.cpp", "-ffp-contract=off", *variant]
    with tempfile.TemporaryDirectory() as folder:

        def compile_one(name: str) -> str:
            out = f"{folder}/{name}.o"
            source, *flags = jobs[name]
            subprocess.check_call([*command, *FLAGS, *flags, *extra, "-c", str(SOURCES / source), "-o", out])
            return out

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, jobs))
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.check_call([*command, "-shared", *extra, *objects, "-o", str(target)])


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        compiler = find_compiler()
        root = Path(__file__).parent.resolve() / "kernels" if self.editable_mode else Path(self.build_lib)
        try:
            if sys.platform != "linux" or compiler is None:
                raise OSError(f"no C++ compiler for {sys.platform}")
            build_library(compiler, root / FOLDER / LIBRARY, [])
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"kvquant: the native CPU library is left out: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """One wheel for every Python: the library is called through ctypes and knows no Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class WithLibrary(Distribution):
    def has_ext_modules(self) -> bool:
        return sys.platform == "linux" and find_compiler() is not None


if __name__ == "__main__":
    setup(distclass=WithLibrary, cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel})
