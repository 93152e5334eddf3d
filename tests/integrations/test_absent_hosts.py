"""Hosts that are not installed: importing our modules needs none of them."""

from __future__ import annotations

import subprocess
import sys


def test_nothing_of_the_host_is_imported() -> None:
    code = (
        "import sys\nfrom grpo_kernels.integrations import prime_rl, nemo_rl, skyrl\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('prime_rl', 'nemo_rl', 'skyrl')])\n"
        "for host in prime_rl, nemo_rl, skyrl:\n"
        "    try:\n        host.enable()\n"
        "    except ImportError as error:\n        print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, *errors = run.stdout.splitlines()
    assert imported == "[]"
    assert errors == [
        "prime-rl: expected version 0.8, but it is not installed",
        "nemo-rl: expected version 0.6, but it is not installed",
        "skyrl: expected version 0.3, but it is not installed",
    ]
