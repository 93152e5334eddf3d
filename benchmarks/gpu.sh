#!/bin/sh
# What only a GPU can answer, what is dearest to know first: tests, measurements, tables.
#   benchmarks/gpu.sh [PYTHON]
# Needs no network and no native extension. Each step is a process of its own, which is ended when its
# seconds, or the LIMIT of all (520 by default), are over; the next begins. What was found until then is
# in the folder OUT, by default benchmarks/results. Compiled kernels are kept in TRITON_CACHE_DIR. The
# exit code is 1 where anything failed, 2 without a GPU.
set -u

python=${1:-python3}
cd "$(dirname "$0")/.."
export OUT="${OUT:-$PWD/benchmarks/results}" PYTHONUNBUFFERED=1 COLUMNS=200
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"
log=$OUT/gpu-log.txt
end=$(($(date +%s) + ${LIMIT:-520}))
status=0

"$python" - >"$log" 2>&1 <<'END' || { echo "no GPU to measure on: $(tail -n 1 "$log")"; exit 2; }
import torch
torch.ones(1, device="cuda").sum().item()  # it does not only exist
memory = torch.cuda.get_device_properties(0).total_memory / 2**30
print(f"{torch.cuda.get_device_name()}, {memory:.0f} GiB, torch {torch.__version__}")
END
summary=$(cat "$log")

# step NAME SECONDS WORDS...: a command of PYTHON; failures and what ours takes go into the summary
step() {
    name=$1 seconds=$2
    shift 2
    left=$((end - $(date +%s)))
    [ "$seconds" -le "$left" ] || seconds=$left
    if [ "$seconds" -le 0 ]; then
        code=timeout
    else
        timeout -s INT -k 8 "$seconds" "$python" "$@" >"$log.step" 2>&1
        code=$?
        cat "$log.step" >>"$log"
    fi
    case $code in 0) state=ok ;; 124 | 137 | timeout) state=timeout ;; *) state=failed ;; esac
    [ $state = ok ] || status=1
    shown=$(grep -E '^(FAILED|ERROR|ours )' "$log.step" 2>/dev/null | head -n 8 | cut -c1-160)
    summary="$summary
$(printf '%-11s%-8s %s' "$name" $state "$(tail -n 1 "$log.step" 2>/dev/null | tr -d '=' | cut -c1-120)")${shown:+
$shown}"
    echo "$name: $state"
    rm -f "$log.step"
}

pytest="-m pytest -p no:cacheprovider -o addopts= -o faulthandler_timeout=90 --tb=short -rfE -q"
measured() { step "$1" "$2" $pytest "benchmarks/test_$1.py" --benchmark-only --suite=gpu "--results=$OUT" -s; }

workers=$("$python" -c "import os, xdist; print('-n', max(1, min(15, os.cpu_count() - 1)))" 2>/dev/null)
step tests 130 $pytest -m gpu $workers --durations=8 --continue-on-collection-errors \
    tests/test_linear_policy_loss.py tests/test_linear_logprobs.py tests/gpu/test_waiting.py \
    tests/schedule tests/head tests/engine tests/backends
step bits 40 $pytest -m gpu tests/gpu/test_bits.py

wheels=$("$python" -c '
from pathlib import Path
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename
tags = set(sys_tags())
print(*(path for path in Path("wheels").glob("*.whl") if parse_wheel_filename(path.name)[3] & tags))')
if [ -n "$wheels" ]; then # in one command: packages share name spaces
    site=$(mktemp -d)
    step wheels 20 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --no-input --target "$site" $wheels
    export PYTHONPATH="$PYTHONPATH:$site"
fi
measured heads 120
measured products 15
measured profile 15
measured tiles 60
step report 20 -m benchmarks.report "$OUT"
measured backwards 520
measured accuracy 520

echo "$summary" | tee -a "$log"
echo "files in $OUT:" $(cd "$OUT" && find . -newer "$log" -o -name 'gpu-*' -type f | sort)
exit $status
