"""NeMo-RL's fused log-probabilities on our kernels, against its own and fp64."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.integrations.host_stand_ins import NEMO_RL
from tests.integrations.nemo_rl_cases import cases
from tests.sharded.ranks import run_on_ranks


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", NEMO_RL.kinds)
def test_ranks_equal_one_process(kind: str, size: int, tmp_path: Path) -> None:
    verdicts = run_on_ranks(partial(cases, kind), size, tmp_path)
    assert {name: verdict for name, verdict in verdicts.items() if verdict} == {}
