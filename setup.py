"""Builds the native CPU kernels. Everything else is in pyproject.toml.

The extension is a plain shared library, loaded with ctypes: it uses neither Python's nor torch's
headers, so one wheel serves every Python. It is optional: where it cannot be compiled the package
installs without it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

if sys.version_info < (3, 11):  # noqa: UP036 (pip asks for metadata before requires-python)
    sys.exit(f"grpo-kernels: expected Python 3.11 or newer, got {sys.version.split()[0]}")
ROOT = Path(__file__).parent
CSRC = Path("csrc")
NATIVE = Extension(
    "grpo_kernels._native",
    sources=sorted(str(path) for path in CSRC.glob("*.cpp")),
    depends=sorted(str(path) for path in CSRC.glob("*.h")),
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

_ABSOLUTE = "https?:|mailto:|#"
# the text before a relative link: in Markdown, around a picture, and in HTML
_BEFORE_LINKS = re.compile(
    rf"""(?:(?P<image>!?)\[[^][]*|\))\]\((?!{_ABSOLUTE})"""
    rf"""|<(?:(?P<picture>img|source)|a)\b[^>]*?\s(?:src(?:set)?|href)=["'](?!{_ABSOLUTE})"""
)


class BuildNative(build_ext):
    """``build_ext`` that compiles unchanged sources once for all environments of a checkout.

    It says what it means when the optional extension does not compile.
    """

    def get_ext_filename(self, fullname: str) -> str:
        """Name the file without the Python that built it."""
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        built = Path(self.get_ext_fullpath(ext.name))
        try:
            kept = ROOT / "build" / f"native-{self.content_key(ext)}.so"
            if not kept.exists():
                print("compiling the CPU kernels: up to a minute", flush=True)
                self.force = True  # an existing library may have other flags
                self.compile_in_parallel()
                super().build_extension(ext)
                kept.parent.mkdir(exist_ok=True)
                partial = kept.with_suffix(f".{os.getpid()}")
                shutil.copy(built, partial)
                partial.replace(kept)
        except (BaseError, CCompilerError):
            print(
                f"grpo-kernels: {ext.name} could not be compiled (the compiler's words are above); "
                "on CPU the pure-torch path will serve. A C++17 g++ or clang++ enables it."
            )
            return
        built.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(kept, built)

    def content_key(self, ext: Extension) -> str:
        """Return a hash of everything the library depends on."""
        command = self.compiler.compiler_so_cxx
        version = b""
        if shutil.which(command[0]):
            version = subprocess.run([*command, "--version"], capture_output=True).stdout
        flags = [self.plat_name, command, self.compiler.linker_so_cxx]
        flags += [ext.extra_compile_args, ext.extra_link_args]
        files = [path.read_bytes() for path in map(Path, [*ext.sources, *ext.depends])]
        return hashlib.sha256(b"\0".join([repr(flags).encode(), version, *files])).hexdigest()[:16]

    def compile_in_parallel(self) -> None:
        """Let the compiler object run one process for each source file."""
        compile_one_by_one = self.compiler.compile

        def compile_all(sources: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: compile_one_by_one([source], **options), sources)
                return [name for names in made for name in names]

        self.compiler.compile = compile_all


class Wheel(bdist_wheel):
    """One wheel for every Python of a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def readme() -> str:
    """Return README.md with absolute links: an index shows it without the files beside it."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    repository = project["urls"]["Repository"]

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["image"] or link["picture"] else "blob"
        return f"{link[0]}{repository}/{kind}/HEAD/"

    return _BEFORE_LINKS.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8"))


setup(
    ext_modules=[NATIVE],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
