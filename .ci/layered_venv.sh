#!/bin/sh
# Creates an environment on top of PYTHON's: it sees those packages, but its own take precedence.
#   .ci/layered_venv.sh VENV PYTHON
set -eu
"$2" -m venv --clear "$1"
own=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$2" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$own/main.pth"
