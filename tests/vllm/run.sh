#!/bin/sh
# Runs the tests with real vLLM in its own environment, created if missing.
#   tests/vllm/run.sh VENV [PYTHON]
# If vLLM can't be installed, the tests are skipped with a notice at the end.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
if ! "$root/tests/vllm/install.sh" "$@"; then
    echo "=========================================================================="
    echo "SKIPPED: the vLLM tests. THE vLLM INTEGRATION WAS NOT TESTED."
    echo "=========================================================================="
    exit 0
fi
venv=$(cd "$1" && pwd)
cd "$root"
PYTHONPATH=$root OMP_NUM_THREADS=1 exec "$venv/bin/python" -m pytest -n 2 --dist loadfile tests/vllm
