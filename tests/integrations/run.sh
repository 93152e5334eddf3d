#!/bin/sh
# Runs the tests of adapters for trainers with conflicting packages, each in its own environment,
# created if missing. Other packages come from PYTHON's environment, which has lower precedence.
#   tests/integrations/run.sh VENVS [PYTHON] [HOST...]
# HOST: a file name in tests/integrations/hosts (default: all). VENVS: the folder for environments.
# A trainer that can't be installed is skipped with a notice at the end.
set -eu

venvs=$1
python=${2:-python3}
[ $# -gt 2 ] && shift 2 || shift $#
root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/tests/integrations
[ $# -gt 0 ] || set -- $(ls "$here/hosts" | sed -n 's/\.txt$//p')

install() {
    "$root/.ci/layered_venv.sh" "$1" "$python" || return 1
    "$1/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps -r "$2" &&
        cp "$2" "$1/installed.txt"
}

skipped=
status=0
for host in "$@"; do
    wanted=$here/hosts/$host.txt
    if ! cmp -s "$wanted" "$venvs/$host/installed.txt" && ! install "$venvs/$host" "$wanted"; then
        skipped="$skipped $host"
        continue
    fi
    venv=$(cd "$venvs/$host" && pwd)
    echo "$host:"
    (cd "$root" && PYTHONPATH="$root" OMP_NUM_THREADS=1 TRITON_INTERPRET=0 \
        "$venv/bin/python" -m pytest "tests/integrations/test_$host.py") || status=1
done
if [ -n "$skipped" ]; then
    echo "=========================================================================="
    echo "SKIPPED: could not be installed:$skipped. THEIR ADAPTERS WERE NOT TESTED."
    echo "=========================================================================="
fi
exit $status
