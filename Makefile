# make demo | make test-fast | make test | make check | make bench | make gpu: each works alone, from a
# fresh machine with python3, make and gcc. All goes into .venv, vLLM into .venv-vllm,
# DeepSpeed into .venv-deepspeed, other trainers into .venv-hosts. make gpu and make gpu-tune need
# no network, but a python3 with torch, and what Triton needs: a GPU machine has it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)

export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-fast test-sharded test-integrations test-vllm test-torch check bench bench-vllm results gpu gpu-tune wheels clean

# ROLLOUT=vllm: vLLM generates
ROLLOUT ?= transformers
ifeq ($(ROLLOUT),transformers)
demo: $(VENV)/.demo
	$(BIN)/python -m grpo_trainer.demo --out runs/demo
else
demo:
	tests/vllm/install.sh .venv-vllm $(PYTHON)
	PYTHONPATH=. .venv-vllm/bin/python -m grpo_trainer.demo --rollout $(ROLLOUT) --out runs/demo-$(ROLLOUT)
endif

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
	OMP_NUM_THREADS=1 tests/triton_compat.sh .venv-triton $(BIN)/python
	tests/sharded/run.sh .venv-deepspeed $(BIN)/python
	tests/integrations/run.sh .venv-hosts $(BIN)/python
	tests/vllm/run.sh .venv-vllm $(PYTHON)

# the everyday loop: without Triton's interpreter, and without the tests that take the longest
test-fast: $(VENV)/.dev
	OMP_NUM_THREADS=1 TRITON_INTERPRET=0 $(BIN)/python -m pytest -n 2 -m "not slow" tests

# the oldest torch, in an environment of its own; where it cannot be installed this says so
test-torch: $(VENV)/.dev
	tests/torch_compat.sh .venv-torch $(BIN)/python

# real DeepSpeed, in an environment of its own; where it cannot be installed this says so
test-sharded: $(VENV)/.dev
	tests/sharded/run.sh .venv-deepspeed $(BIN)/python

# the adapters to other trainers, with the real ones, each in an environment of its own; where one
# cannot be installed this says so
test-integrations: $(VENV)/.dev
	tests/integrations/run.sh .venv-hosts $(BIN)/python

# real vLLM, in an environment of its own; where it cannot be installed this says so
test-vllm:
	tests/vllm/run.sh .venv-vllm $(PYTHON)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layering.py

bench: $(VENV)/.dev
	$(BIN)/python -m pytest benchmarks --benchmark-only --full --results benchmarks/results; \
	status=$$?; $(BIN)/python -m benchmarks.report --documents; exit $$status

# generation and weight updates by engine, with real vLLM: the part of bench that needs it
bench-vllm: $(VENV)/.dev
	tests/vllm/install.sh .venv-vllm $(PYTHON)
	.venv-vllm/bin/python -m pip --disable-pip-version-check install --quiet pytest-benchmark
	PYTHONPATH=. .venv-vllm/bin/python -m pytest benchmarks/test_rollouts.py --benchmark-only --full \
		--results benchmarks/results; status=$$?; $(BIN)/python -m benchmarks.report --documents; exit $$status

# tables, plots and the numbers in README and docs, from the result files
results: $(VENV)/.dev
	$(BIN)/python -m benchmarks.report --documents

# checks, measurements, benchmarks, tests and a summary in under nine minutes; writes to OUT, by
# default benchmarks/results
gpu:
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu

# rewrites grpo_kernels/backends/configs/tuned.py
gpu-tune:
	PYTHONPATH=. $(PYTHON) -m benchmarks.tune $(TUNE_OPTIONS)

# the baselines for make gpu, where that machine has no network: carry the folder along. With
# BASELINES="benchmarks/baselines.txt benchmarks/baselines-hopper.txt" also those on the CuTe DSL, a large one.
BASELINES ?= benchmarks/baselines.txt
WHEELS_PYTHON ?= 3.12
WHEELS_PLATFORMS := _2_28 _2_27 _2_24 _2_17 2014 1
wheels:
	rm -rf wheels
	$(PYTHON) -m pip download --disable-pip-version-check --no-deps --only-binary=:all: \
		--implementation cp --python-version $(WHEELS_PYTHON) \
		$(WHEELS_PLATFORMS:%=--platform manylinux%_x86_64) \
		-d wheels $(BASELINES:%=-r %)

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
	rm -rf $(VENV) .venv-triton .venv-torch .venv-vllm .venv-deepspeed .venv-hosts build runs *.egg-info
