# make demo | make test | make check | make bench | make gpu: each works alone, from a fresh machine
# with python3, make and gcc. All goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)

export TOKENIZERS_PARALLELISM := false

.PHONY: demo test check bench gpu clean

demo: $(VENV)/.demo
	$(BIN)/python -m grpo_trainer.demo --out runs/demo

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests
	OMP_NUM_THREADS=1 tests/triton_compat.sh .venv-triton36 $(BIN)/python

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layering.py

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.report

# with the machine's own torch: a GPU machine has it
gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu tests/logprob tests/test_fused.py tests/test_pointwise.py

$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
ifeq ($(HAS_GPU),0)
	# the CPU build saves gigabytes; taken from pip's own configuration, else from PyTorch's index
	$(PIP) install --quiet "torch==$(TORCH)+cpu" || \
	$(PIP) install --quiet --index-url https://download.pytorch.org/whl/cpu "torch==$(TORCH)"
else
	$(PIP) install --quiet "torch==$(TORCH)"
endif
	touch $@

# a source file that changed is rebuilt into the environment
NATIVE := setup.py pyproject.toml $(wildcard csrc/*)

$(VENV)/.demo: $(VENV)/.torch $(NATIVE)
	$(PIP) install --quiet -c constraints.txt -e ".[demo]"
	touch $@

$(VENV)/.dev: $(VENV)/.torch $(NATIVE)
	$(PIP) install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .venv-triton36 build runs *.egg-info
