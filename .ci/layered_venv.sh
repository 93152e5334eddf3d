#!/bin/sh
# Makes an environment whose packages come before those of the environment of PYTHON, which it sees.
#   .ci/layered_venv.sh VENV PYTHON
set -eu
"$2" -m venv --clear "$1"
own=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$2" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$own/main.pth"
