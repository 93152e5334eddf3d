#!/bin/sh
# Runs the tests of the pretrained-model example in its environment, created if missing.
#   tests/real/run.sh VENV [PYTHON] [PYTEST ARGUMENTS]
# If it can't be installed, the tests are skipped with a notice at the end. Conflicting versions in
# constraints.txt are an error.
set -eu

venv=$1
python=${2:-python3}
[ $# -gt 2 ] && shift 2 || shift $#
cd "$(dirname "$0")/../.."

if ! .ci/install_real.sh "$venv" "$python"; then
    if grep -q ResolutionImpossible "$venv/install.log"; then
        echo "constraints.txt: expected versions compatible with the packages in $venv/install.log" >&2
        exit 1
    fi
    echo "=========================================================================="
    echo "SKIPPED: the pretrained model could not be installed. NOTHING REAL WAS TRAINED."
    echo "=========================================================================="
    exit 0
fi
PYTHONPATH=$PWD exec "$venv/bin/python" -m pytest "$@" tests/real
