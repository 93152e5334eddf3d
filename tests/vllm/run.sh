#!/bin/sh
# Runs the tests with real vLLM, in an environment of its own that is made first if need be.
#   tests/vllm/run.sh VENV [PYTHON]
# Where vLLM cannot be installed the tests are skipped, and the last lines say so.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
if ! "$root/tests/vllm/install.sh" "$@"; then
    echo "=========================================================================="
    echo "SKIPPED: the vLLM tests. NOTHING OF THE vLLM INTEGRATION WAS TESTED."
    echo "=========================================================================="
    exit 0
fi
venv=$(cd "$1" && pwd)
cd "$root"
PYTHONPATH=$root OMP_NUM_THREADS=1 exec "$venv/bin/python" -m pytest -n 2 --dist loadfile tests/vllm
