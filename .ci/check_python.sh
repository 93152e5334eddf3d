#!/bin/sh
# Checks PYTHON before anything is installed, and reports in one line what it lacks.
#   .ci/check_python.sh PYTHON
set -eu

python=$1
root=$(cd "$(dirname "$0")/.." && pwd)
oldest=$(sed -n 's/^requires-python = ">=\(.*\)"$/\1/p' "$root/pyproject.toml")

if ! "$python" -c "import sys; sys.exit(sys.version_info < (3, ${oldest#3.}))" 2>/dev/null; then
    found=$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo none)
    echo "expected Python $oldest or newer as PYTHON=$python, got $found; e.g. make demo PYTHON=python3.12" >&2
    exit 1
fi
if ! "$python" -c "import ensurepip, venv" 2>/dev/null; then
    echo "expected venv in PYTHON=$python, got none; on Debian and Ubuntu: apt install python3-venv" >&2
    exit 1
fi
if ! command -v "${CXX:-g++}" >/dev/null && ! command -v c++ >/dev/null; then
    echo "no C++ compiler (g++) found: the native CPU kernels will not be built, pure PyTorch is used instead" >&2
fi
