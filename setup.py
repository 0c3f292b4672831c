"""Builds the C kernels into wheels; everything else is in setup.cfg.

A wheel has one library for each instruction set and needs no particular Python: py3-none-<platform>. An editable
install gets none, and compiles what it needs when an engine starts.
"""

import os
import runpy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

KERNELS = Path("tgis/engines/kernels/cpu")


class BuildKernels(Command):
    """Compile every library of this architecture; CC names another compiler than cc."""

    user_options: list[Any] = []
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: Any = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        if self.editable_mode:
            return
        kernels, target = runpy.run_path(str(KERNELS / "build.py")), Path(self.build_lib, KERNELS)
        target.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory() as scratch:
            for isa in kernels["isa_flags"]():
                library = kernels["compile_library"](isa, os.environ.get("CC", "cc"), Path(scratch))
                self.copy_file(str(library), str(target / library.name))

    def get_source_files(self) -> list[str]:
        return [str(path) for path in (KERNELS / "csrc").glob("*.[ch]")]

    def get_outputs(self) -> list[str]:
        return [str(path) for path in Path(self.build_lib, KERNELS).glob("*.so")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    sub_commands = [("build_py", None), ("build_kernels", None)]


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    distclass=PlatformDistribution,
    cmdclass={"build": Build, "build_kernels": BuildKernels, "bdist_wheel": PlatformWheel},
)
