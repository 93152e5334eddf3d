#!/bin/sh
# Runs the Triton tests with the oldest supported Triton, interpreted and compiled for every target.
#   tests/triton_compat.sh VENV [PYTHON]
# VENV is created if missing. It holds only Triton and NumPy; everything else, such as torch, comes
# from PYTHON's environment (default: python3), which has lower precedence.
set -eu

venv=$1
python=${2:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
wanted=$root/tests/backends/old_triton.txt

if ! cmp -s "$wanted" "$venv/installed.txt"; then
    "$python" -m venv --clear "$venv"
    own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$wanted"
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$own/main.pth"
    cp "$wanted" "$venv/installed.txt"
fi

cd "$root"
"$venv/bin/python" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
PYTHONPATH=$root exec "$venv/bin/python" -m pytest -n 2 --dist worksteal tests/backends/test_triton_*.py tests/backends/test_codegen.py \
    tests/backends/test_rows.py tests/backends/test_logp_gradient.py tests/backends/test_linear.py -k "triton or codegen or logp_gradient"
