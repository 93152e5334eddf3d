#!/bin/sh
# Runs the kernel tests with the oldest supported torch; triton_compat.sh does the same for Triton.
#   tests/torch_compat.sh VENV [PYTHON]
# VENV is created if missing, with torch's CPU build if available, or else the 7 GB build.
# Other packages come from PYTHON's environment (default: python3), which has lower precedence.
# If torch can't be installed, the tests are skipped with a notice at the end.
set -eu

venv=$1
python=${2:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
wanted=$root/tests/oldest_torch.txt
version=$(sed -n 's/^torch==//p' "$wanted")
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }

install() {
    "$python" -m venv --clear "$venv"
    "$root/.ci/install_torch.sh" "$venv/bin/python" "$version" && pip -r "$wanted" || return 1
    own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$own/main.pth"
    cp "$wanted" "$venv/installed.txt"
}

if ! cmp -s "$wanted" "$venv/installed.txt" && ! install; then
    echo "=========================================================================="
    echo "SKIPPED: torch $version could not be installed. SUPPORT FOR IT WAS NOT TESTED."
    echo "=========================================================================="
    exit 0
fi
cd "$root"
"$venv/bin/python" -c 'import torch; print("torch", torch.__version__)'
PYTHONPATH=$root OMP_NUM_THREADS=1 TRITON_INTERPRET=0 exec "$venv/bin/python" -m pytest -n 2 \
    tests/engine tests/head tests/losses tests/schedule tests/test_linear_*.py
