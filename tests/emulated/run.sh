#!/bin/sh
# Runs the Triton kernels as AMD machine code (gfx942) in tinygrad's emulator.
#   tests/emulated/run.sh FOLDER [PYTHON] [PYTEST ARGUMENTS]
# TINYGRAD is a checkout of the commit below; by default it is fetched into FOLDER. If it or clang is
# not available, the tests are skipped with a notice at the end.
set -eu

commit=a9069c177a9da9cca18593edf55acd2e6073cca6
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
folder=$1
python=${2:-python3}
[ $# -gt 2 ] && shift 2 || shift $#

skip() {
    echo "=========================================================================="
    echo "SKIPPED: $1. NO KERNEL WAS EXECUTED AS MACHINE CODE."
    echo "=========================================================================="
    exit 0
}

fetch() {
    git init -q "$folder" &&
        git -C "$folder" fetch -q --depth 1 https://github.com/tinygrad/tinygrad "$commit" &&
        git -C "$folder" checkout -q FETCH_HEAD
}

command -v clang >/dev/null || skip "clang is not installed, which compiles emulated instructions"
if [ -z "${TINYGRAD:-}" ]; then
    [ -d "$folder/test/mockgpu" ] || fetch 2>/dev/null ||
        skip "tinygrad $commit could not be fetched, and TINYGRAD names no checkout"
    TINYGRAD=$folder
fi
found=$(git -C "$TINYGRAD" rev-parse HEAD 2>/dev/null || echo "no git repository")
if [ "$found" != "$commit" ]; then
    echo "TINYGRAD: expected a checkout of tinygrad's commit $commit; got $found in $TINYGRAD" >&2
    exit 1
fi

[ $# -gt 0 ] || set -- --every-kernel tests/net/test_calls.py tests/emulated/stores.py \
    tests/backends/test_anchored.py tests/backends/test_codegen.py tests/backends/test_divergence.py \
    tests/backends/test_entries.py tests/backends/test_linear.py tests/backends/test_logp_gradient.py \
    tests/backends/test_packing.py \
    tests/backends/test_rows.py tests/backends/test_topk.py tests/backends/test_triton.py \
    -k "test_call or triton or cpu"
export PYTHONPATH="$root:$(cd "$TINYGRAD" && pwd)" OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
exec "$python" -m pytest -p tests.emulated.plugin -n 2 "$@"
