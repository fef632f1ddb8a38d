"""The parts of the build that pyproject.toml cannot say: the C++ extension, and the C++ sources as package data."""

import shutil
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools.command.build_py import build_py

SOURCES = ["csrc/backend_plan.h", "csrc/backend_plan.cc", "csrc/page_size.h"]


class BuildWithHeaders(build_py):
    """Ship the C++ sources for engines inside the wheel, where `dispatch.get_include()` finds them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "dispatch", "include")
            folder.mkdir(parents=True, exist_ok=True)
            for source in SOURCES:
                shutil.copy(source, folder)


setup(
    ext_modules=[
        Pybind11Extension(
            "dispatch._core",
            ["csrc/bindings.cc", "csrc/backend_plan.cc"],
            depends=["csrc/backend_plan.h", "csrc/page_size.h"],
            cxx_std=17,
        )
    ],
    cmdclass={"build_py": BuildWithHeaders},
)
