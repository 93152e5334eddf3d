#!/bin/sh
# Installs torch. Without a GPU that is the CPU build, which saves gigabytes: from where pip is
# configured to look, else from PyTorch's index. Where neither has it, and with a GPU, PyPI's.
# A terminal shows pip's progress, a log stays short.
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

# what these two miss is no error yet
if nvidia-smi -L 2>/dev/null | grep -q GPU || ! cpu_build 2>/dev/null; then
    pip "torch==$version"
fi
