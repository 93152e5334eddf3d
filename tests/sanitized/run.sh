#!/bin/sh
# Runs the native kernels' tests on a build with AddressSanitizer and UndefinedBehaviorSanitizer; an
# error stops the process and fails this part.
#   tests/sanitized/run.sh BUILD [PYTHON] [PYTEST ARGUMENTS]
# The package is built into BUILD and imported from there; the normal build is untouched. If g++ has
# no sanitizers, the tests are skipped with a notice at the end.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
mkdir -p "$1"
build=$(cd "$1" && pwd)
python=${2:-python3}
[ $# -gt 2 ] && shift 2 || shift $#
flags="-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all"
flags="$flags -fno-omit-frame-pointer -g -D_GLIBCXX_ASSERTIONS"

# g++ prints the name unchanged if the library doesn't exist
case $(g++ -print-file-name=libasan.so 2>/dev/null)$(g++ -print-file-name=libubsan.so 2>/dev/null) in
/*/libasan.so/*/libubsan.so) ;;
*)
    echo "=========================================================================="
    echo "SKIPPED: g++ has no libasan and libubsan. NO NATIVE CODE WAS SANITIZED."
    echo "=========================================================================="
    exit 0
    ;;
esac

rm -rf "$build/grpo_kernels"
CXXFLAGS=$flags LDFLAGS=$flags "$python" setup.py -q build --build-base "$build" --build-lib "$build"
g++ -std=c++17 -shared -fPIC tests/sanitized/throwing_new.cpp -o "$build/throwing_new.so"

# modules in the working directory must not shadow the build's
export PYTHONSAFEPATH=1 PYTHONPATH="$build:$root" TRITON_INTERPRET=0 OMP_NUM_THREADS=2
# Python leaks on purpose; the operator new that throws is not AddressSanitizer's
options="detect_leaks=0:allocator_may_return_null=1:alloc_dealloc_mismatch=0"
options="$options:verify_asan_link_order=0"
sanitized() {
    env LD_PRELOAD="$build/throwing_new.so $(g++ -print-file-name=libasan.so)" \
        ASAN_OPTIONS="$options" UBSAN_OPTIONS=print_stacktrace=1 "$python" "$@"
}

if ! sanitized -m tests.sanitized.overrun 2>&1 | grep -q heap-buffer-overflow; then
    echo "FAILED: a read past the end of a row was not detected"
    exit 1
fi
# sanitizers bypass Python's output, which must not buffer it when the process ends
sanitized -m pytest --capture=sys --import-mode=append -p no:cacheprovider -n 2 "$@" \
    tests/backends --ignore-glob="*triton*" --ignore-glob="*codegen*"
