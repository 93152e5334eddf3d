#!/usr/bin/env bash
# Builds the sdist and the wheel into dist/ and checks both: their files, their page on an index, and that
# they install and run with only torch, with and without a compiler.
#   .ci/check_packages.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
work=$PWD/build/packages
torch=$(sed -n 's/^torch==//p' constraints.txt)
pip() { "$work/$1/bin/python" -m pip --disable-pip-version-check "${@:2}"; }
install() { pip clean install --quiet --no-cache-dir "$@"; }
# run outside the source folder
check() { (cd "$work" && clean/bin/python "$OLDPWD/.ci/check_installed.py" "$1"); }

rm -rf dist "$work"
mkdir -p "$work"
for environment in tools clean; do "$python" -m venv "$work/$environment"; done
pip tools install --quiet build twine
.ci/install_torch.sh "$work/clean/bin/python" "$torch"

echo "== the sdist, and a wheel built from it"
"$work/tools/bin/python" -m build --outdir dist . >"$work/build.log" || { cat "$work/build.log"; exit 1; }
"$work/tools/bin/python" -m twine check --strict dist/*
"$python" .ci/check_contents.py dist

echo "== the wheel, with only torch"
install dist/*.whl
pip clean check
check native

echo "== the sdist with a compiler"
pip clean uninstall --quiet --yes grpo-kernels
install --no-deps dist/*.tar.gz
check native

echo "== the sdist without a compiler"
pip clean uninstall --quiet --yes grpo-kernels
CC=false CXX=false install --no-deps dist/*.tar.gz
check torch
rm -rf "$work"
