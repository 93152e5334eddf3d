# make demo | make real | make test-fast | make test-main | make test-long | make test | make check | make docs | make bench | make gpu:
# each works alone, from a fresh machine with Python 3.11, its venv, make and g++. All goes into .venv, the
# pretrained model into .venv-real, vLLM into .venv-vllm, DeepSpeed into .venv-deepspeed, other trainers into
# .venv-hosts, the newest packages into .venv-newest and .venv-vllm-newest. make gpu and make gpu-tune need no
# network, but a python3 with torch, and what Triton needs: a GPU machine has it. make gpu-status needs only a python3.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# a terminal shows pip's progress, a log stays short
QUIET := $(shell [ -t 2 ] || echo --quiet)

TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

export TOKENIZERS_PARALLELISM := false
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo real test announce-test test-main test-long test-fast test-sharded test-real test-integrations test-vllm test-newest test-torch test-sanitized test-emulated check docs docs-serve packages release bench bench-real bench-vllm results gpu gpu-model gpu-status gpu-tune wheels clean

# ROLLOUT=vllm: vLLM generates
ROLLOUT ?= transformers
ifeq ($(ROLLOUT),transformers)
demo: $(VENV)/.report
	$(BIN)/python -m grpo_trainer.demo --out runs/demo
else
demo:
	tests/vllm/install.sh .venv-vllm $(PYTHON)
	PYTHONPATH=. .venv-vllm/bin/python -m grpo_trainer.demo --rollout $(ROLLOUT) --out runs/demo-$(ROLLOUT)
endif

# trains a pretrained model on two tasks and prints a report; QUICK=1 takes three steps, OPTIONS go to grpo-train
real: $(VENV)/.report
	@.ci/install_real.sh .venv-real $(BIN)/python
	PYTHONPATH=. .venv-real/bin/python docs/examples/real/smollm.py --out runs/real$(if $(QUICK),-quick --quick) $(OPTIONS)

# every part, and a summary of them
test: announce-test $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.everything $(PYTHON)

announce-test:
	@echo "make test: about 45 minutes on two free cores, and 7 GB in six environments."
	@echo "make test-main is its largest part, kernels and trainer: about 15 minutes, and 2.8 GB in $(VENV)."

# what needs no further environment
test-main: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not long"

# what is marked long, such as kernels compiled for GPUs, every benchmark and examples that train
test-long: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m long

# the everyday loop: without Triton's interpreter, and without the tests that take the longest
test-fast: $(VENV)/.dev
	OMP_NUM_THREADS=1 TRITON_INTERPRET=0 $(BIN)/python -m pytest -n 2 -m "not slow and not long" tests

# the oldest torch, in an environment of its own; where it cannot be installed this says so
test-torch: $(VENV)/.dev
	tests/torch_compat.sh .venv-torch $(BIN)/python

# the native kernels under AddressSanitizer and UndefinedBehaviorSanitizer; where g++ has none this
# says so
test-sanitized: $(VENV)/.dev
	tests/sanitized/run.sh build/sanitized $(BIN)/python

# Triton's kernels as machine code of an AMD GPU, in the emulator of tinygrad's sources: of the
# checkout that TINYGRAD names, else of one that is fetched; where that or clang is missing this says so
test-emulated: $(VENV)/.dev
	TINYGRAD="$(TINYGRAD)" tests/emulated/run.sh build/tinygrad $(BIN)/python

# the main tests and those with vLLM, with the newest packages of the index, in environments of
# their own; torch stays that of constraints.txt
test-newest:
	tests/newest.sh .venv-newest .venv-vllm-newest $(PYTHON)

# real DeepSpeed, in an environment of its own; where it cannot be installed this says so
test-sharded: $(VENV)/.dev
	tests/sharded/run.sh .venv-deepspeed $(BIN)/python

# the example with a pretrained model; skipped, with a notice, if its packages cannot be installed
test-real: $(VENV)/.dev
	tests/real/run.sh .venv-real $(BIN)/python

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

# the documentation as a site, in build/site; a link or an anchor that leads nowhere fails it
docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict
	@echo "open this in a browser: $(CURDIR)/build/site/index.html"

# the same on http://127.0.0.1:8000, made anew when a page changes
docs-serve: $(VENV)/.docs
	$(BIN)/python -m mkdocs serve

# the sdist and the wheel, built into dist and checked in environments of their own
packages:
	.ci/check_packages.sh $(PYTHON)

# make release VERSION=X.Y.Z: checks, packages, and the tag; what it says to push publishes them
release:
	@.ci/release.sh $(PYTHON) $(VERSION)

bench: $(VENV)/.dev
	$(BIN)/python -m pytest benchmarks --benchmark-only --full --results benchmarks/results; \
	status=$$?; $(BIN)/python -m benchmarks.report --documents; exit $$status

# generation and weight updates by engine, with real vLLM: the part of bench that needs it
bench-vllm: $(VENV)/.dev
	tests/vllm/install.sh .venv-vllm $(PYTHON)
	.venv-vllm/bin/python -m pip --disable-pip-version-check install --quiet pandas pytest-benchmark tabulate
	PYTHONPATH=. .venv-vllm/bin/python -m pytest benchmarks/test_rollouts.py --benchmark-only --full \
		--results benchmarks/results; status=$$?; $(BIN)/python -m benchmarks.report --documents; exit $$status

# a pretrained model trained next to TRL, and its softmax: hours on two cores
bench-real: $(VENV)/.dev
	@.ci/install_real.sh .venv-real $(BIN)/python
	PYTHONPATH=. .venv-real/bin/python -m benchmarks.real_text
	PYTHONPATH=. .venv-real/bin/python -m pytest benchmarks/test_real.py benchmarks/test_curves.py benchmarks/test_sparsity.py \
		benchmarks/test_accuracy.py benchmarks/test_heads.py -k "(test_real or curves or sparsity or real-text) and not vllm" \
		--benchmark-only --full --results benchmarks/results
	tests/vllm/install.sh .venv-vllm $(PYTHON)
	@.ci/install_real.sh .venv-vllm-real .venv-vllm/bin/python
	.venv-vllm-real/bin/python -m pip --disable-pip-version-check install --quiet pandas pytest-benchmark tabulate
	PYTHONPATH=. .venv-vllm-real/bin/python -m pytest benchmarks/test_curves.py benchmarks/test_mismatch.py \
		-k "vllm or mismatch" --benchmark-only --full --results benchmarks/results
	$(BIN)/python -m benchmarks.report --documents

# tables, plots and the numbers in README and docs, from the result files
results: $(VENV)/.dev
	$(BIN)/python -m benchmarks.report --documents

# jobs for a GPU that have no result of these kernels yet, as many as fit into LIMIT seconds, by default 285;
# JOBS="heads bits" names some. Results go to OUT, by default benchmarks/results; call it again to go on.
gpu:
	@PYTHONPATH=. $(PYTHON) -m benchmarks.gpu $(JOBS)

# without a GPU: which jobs there are, what each decides, and which have a result of these kernels
gpu-status:
	@PYTHONPATH=. $(PYTHON) -m benchmarks.gpu --status $(JOBS)

# the kernels at all tiles; the best belong into grpo_kernels/backends/gpu_tiles.py
gpu-tune:
	PYTHONPATH=. $(PYTHON) -m pytest -p no:cacheprovider -o addopts= benchmarks/test_tiles.py --benchmark-only \
	    --suite=gpu-full "--results=$${OUT:-benchmarks/results}"

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

# the pretrained model and its tasks for make gpu, likewise
gpu-model: $(VENV)/.report
	@.ci/install_real.sh .venv-real $(BIN)/python
	PYTHONPATH=. .venv-real/bin/python -m benchmarks.gpu.model

$(VENV)/.torch: constraints.txt
	@.ci/check_python.sh $(PYTHON)
	@echo "installing torch, triton, transformers ... into $(VENV): about 2.8 GB (CUDA: 7 more), 2 to 10 minutes"
	@$(PYTHON) -m venv $(VENV)
	@.ci/install_torch.sh $(BIN)/python $(TORCH)
	@touch $@

# a source file that changed is rebuilt into the environment
NATIVE := setup.py pyproject.toml grpo_kernels/common/version.py $(wildcard csrc/*)

# [dev] contains [report] and [docs]
$(VENV)/.report $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: $(VENV)/.torch $(NATIVE)
	@echo "installing grpo-kernels[$*] into $(VENV); compiles the CPU kernels if they have changed: up to a minute"
	@$(PIP) install $(QUIET) -c constraints.txt -e ".[$*]"
	@if [ -f grpo_kernels/_native.so ]; then echo "native CPU kernels: built"; else \
		echo "native CPU kernels: not built, pure torch serves; with g++ installed: touch setup.py, and again"; fi
	@touch $@ $(if $(filter dev,$*),$(VENV)/.report $(VENV)/.docs)

clean:
	rm -rf $(VENV) .venv-real .venv-vllm-real .venv-triton .venv-torch .venv-vllm .venv-deepspeed .venv-hosts .venv-newest \
		.venv-vllm-newest build dist real-model runs *.egg-info
