"""Two processes: each gets completions of its own prompts, by the same weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.vllm.vllm_helpers import CLOSE, ROOT, Server, free_port, make_model

SCRIPT = Path(__file__).with_name("two_ranks.py")


def run(*words: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are processes on a CPU")
@pytest.mark.parametrize("mode", ["colocate", "parallel", "sharded", "server", "overlap"])
def test_two_gloo_ranks(tmp_path, tokenizer, mode):
    file = str(tmp_path / "out")
    if mode in ("colocate", "parallel", "sharded"):  # an engine each, or one together
        run(mode, file)
    else:
        make_model(tokenizer, tied=True).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        server = Server(tmp_path / "model", free_port(), tmp_path / "log.txt")
        try:
            run(mode, file, str(server.port))
        finally:
            server.kill()
    first, second = (json.loads(Path(f"{file}.{rank}.json").read_text()) for rank in range(2))
    assert first["mismatch"] == second["mismatch"]
    assert (first["mismatch"] < CLOSE) == (mode != "overlap")  # there completions are older
    expected = [0, 1, 1] if mode == "overlap" else []
    assert first["staleness"] == second["staleness"] == expected
    assert first["weight"] == second["weight"]
    assert first["seen"] != second["seen"]  # they draw different random numbers
