"""Builds the native CPU kernels. All else about the package is in pyproject.toml.

The extension is a plain shared library, loaded with ctypes: it uses neither Python's nor torch's
headers. It is optional: where it cannot be compiled the package installs without it.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

CSRC = Path("csrc")
NATIVE = Extension(
    "grpo_kernels._native",
    sources=sorted(str(path) for path in CSRC.glob("*.cpp")),
    depends=sorted(str(path) for path in (*CSRC.glob("*.h"), *CSRC.glob("*.inc"))),
    language="c++",
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-ffp-contract=fast",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
        "-pthread",
        "-Wno-psabi",
    ],
    extra_link_args=["-pthread"],
    optional=True,
)


class BuildNative(build_ext):
    """``build_ext`` that says what it means when an optional extension does not compile."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError):
            print(
                f"grpo-kernels: {ext.name} could not be compiled (the compiler's words are above); "
                "on CPU the pure-torch path will serve. A C++17 g++ or clang++ enables it."
            )


setup(ext_modules=[NATIVE], cmdclass={"build_ext": BuildNative})
