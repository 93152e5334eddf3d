#!/bin/sh
# Runs the tests with real DeepSpeed on its CPU accelerator, in its own environment, created if
# missing. Other packages come from PYTHON's environment, which has lower precedence.
#   tests/sharded/run.sh VENV [PYTHON] [PYTEST ARGUMENTS]
# If DeepSpeed can't be installed, the tests are skipped with a notice at the end.
set -eu

venv=$1
python=${2:-python3}
[ $# -gt 2 ] && shift 2 || shift $#
root=$(cd "$(dirname "$0")/../.." && pwd)
wanted=$root/tests/sharded/deepspeed.txt
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }

install() {
    "$root/.ci/layered_venv.sh" "$venv" "$python" || return 1
    # its setup looks for torch and wants no isolated build
    grep -v deepspeed "$wanted" >"$venv/first.txt"
    pip -r "$venv/first.txt" &&
        DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip --no-build-isolation -r "$wanted" || return 1
    DS_ACCELERATOR=cpu "$venv/bin/python" -c "import deepspeed" && cp "$wanted" "$venv/installed.txt"
}

if ! cmp -s "$wanted" "$venv/installed.txt" && ! install; then
    echo "=========================================================================="
    echo "SKIPPED: DeepSpeed could not be installed. ZeRO WAS NOT TESTED."
    echo "=========================================================================="
    exit 0
fi
venv=$(cd "$venv" && pwd)
cd "$root"
# DeepSpeed compiles an op on first use; a killed build leaves a lock on which every later process
# would wait forever
export TORCH_EXTENSIONS_DIR="$venv/extensions"
rm -rf "$TORCH_EXTENSIONS_DIR"/*/lock
export PYTHONPATH="$root" OMP_NUM_THREADS=1 TRITON_INTERPRET=0 DS_ACCELERATOR=cpu DS_BUILD_OPS=0
exec "$venv/bin/python" -m pytest -m deepspeed "$@" tests/sharded tests/trainer tests/integrations
