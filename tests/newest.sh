#!/bin/sh
# Runs the main tests and then the vLLM tests with the newest packages on the index, unpinned
# (transformers, accelerate, peft, datasets, TRL, vLLM and others), except for torch.
#   tests/newest.sh VENV VLLM_VENV [PYTHON]
# Both environments are created if missing, or else upgraded.
set -eu

venv=$1
vllm_venv=$2
python=${3:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
torch=$(sed -n 's/^torch==//p' "$root/constraints.txt")
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

cd "$root"
if [ ! -x "$venv/bin/python" ]; then
    .ci/check_python.sh "$python"
    "$python" -m venv "$venv"
    .ci/install_torch.sh "$venv/bin/python" "$torch"
fi
echo "installing the newest packages into $venv: 2 to 10 minutes"
pip install --quiet --upgrade --upgrade-strategy eager "torch==$torch" -e ".[dev]"
pip freeze | grep -iE "^(torch|transformers|accelerate|peft|datasets|trl)=="

failed=0
OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -n 2 --dist worksteal || failed=1
NEWEST=1 tests/vllm/run.sh "$vllm_venv" "$python" || failed=1
exit $failed
