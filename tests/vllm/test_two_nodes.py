"""Two nodes of two processes with an FSDP2 policy, and a vLLM server beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.vllm.vllm_helpers import CLOSE, ROOT, Server, free_port, make_model

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("two_nodes.py")
FILE = ROOT / "grpo_trainer" / "accelerate_configs" / "fsdp2.yaml"


def launch(node: int, port: int, *words: str) -> subprocess.Popen[str]:
    """Start the processes of a node, as they are started on a machine of its own."""
    options = {
        "--config_file": FILE,
        "--num_machines": 2,
        "--num_processes": 4,
        "--machine_rank": node,
        "--main_process_ip": "127.0.0.1",
        "--main_process_port": port,
        "--mixed_precision": "no",
    }
    command = [str(word) for pair in options.items() for word in pair]
    path = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", *command, str(SCRIPT), *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are processes on a CPU")
def test_two_nodes_and_a_server(tmp_path, tokenizer):
    """The server has the weights of the shards: its log-probabilities are the policy's."""
    make_model(tokenizer, tied=False).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    server = Server(tmp_path / "model", free_port(), tmp_path / "log.txt")
    file, port = str(tmp_path / "out"), free_port()
    nodes = []
    try:
        nodes = [launch(node, port, file, str(server.port)) for node in range(2)]
        said = [node.communicate(timeout=300)[0] for node in nodes]
    finally:
        server.kill()
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "".join(text[-4000:] for text in said)
    found = [json.loads(Path(f"{file}.{rank}.json").read_text()) for rank in range(4)]
    assert all(one == found[0] for one in found)
    current, overlapping = found[0]
    assert current["processes"] == 4 and current["local"] == 2
    assert current["placement"] == "DistributedType.FSDP"
    assert current["mismatch"] < CLOSE < overlapping["mismatch"]  # completions are older
    assert (current["staleness"], overlapping["staleness"]) == ([], [0, 1, 1])
