#!/bin/sh
# Runs the tests of the example with a pretrained model, in its environment, which is made first.
#   tests/real/run.sh VENV [PYTHON] [PYTEST ARGUMENTS]
# Where it cannot be installed the tests are skipped, and the last lines say so; versions in
# constraints.txt that do not fit its packages are an error.
set -eu

venv=$1
python=${2:-python3}
[ $# -gt 2 ] && shift 2 || shift $#
cd "$(dirname "$0")/../.."

if ! .ci/install_real.sh "$venv" "$python"; then
    if grep -q ResolutionImpossible "$venv/install.log"; then
        echo "constraints.txt: expected versions that fit the packages of $venv/install.log" >&2
        exit 1
    fi
    echo "=========================================================================="
    echo "SKIPPED: the pretrained model could not be installed. NOTHING REAL WAS TRAINED."
    echo "=========================================================================="
    exit 0
fi
PYTHONPATH=$PWD exec "$venv/bin/python" -m pytest "$@" tests/real
