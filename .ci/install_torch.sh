#!/bin/sh
# Installs torch. Without a GPU this is the CPU build, which saves gigabytes: from pip's configured
# index, or else from PyTorch's. With a GPU, or if neither index has it, this is PyPI's build.
# Shows pip's progress on a terminal and keeps logs short.
#   .ci/install_torch.sh PYTHON VERSION
set -eu

python=$1
version=$2
quiet=$([ -t 2 ] || echo --quiet)
pip() { "$python" -m pip --disable-pip-version-check install $quiet "$@"; }
cpu_build() {
    pip "torch==$version+cpu" ||
        pip --retries 0 --timeout 15 --index-url https://download.pytorch.org/whl/cpu "torch==$version"
}

# a package that both lack is not an error yet
if nvidia-smi -L 2>/dev/null | grep -q GPU || ! cpu_build 2>/dev/null; then
    pip "torch==$version"
fi
