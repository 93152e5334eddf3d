# make demo | make real | make test-fast | make test-main | make test-long | make test | make check | make docs | make bench | make gpu:
# each is self-contained on a fresh machine with Python 3.11, venv, make and g++. Everything is installed into .venv, except
# the pretrained model (.venv-real), vLLM (.venv-vllm), DeepSpeed (.venv-deepspeed), other trainers (.venv-hosts) and the newest
# packages (.venv-newest, .venv-vllm-newest). make gpu and make gpu-tune need no network, only a python3 with torch and
# Triton's requirements, as GPU machines have. make gpu-status needs only python3.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# show pip's progress on a terminal, keep logs short
QUIET := $(shell [ -t 2 ] || echo --quiet)

TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

export TOKENIZERS_PARALLELISM := false
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo real test announce-test test-main test-long test-fast test-sharded test-real test-integrations test-vllm test-newest test-torch test-sanitized test-emulated check docs docs-serve packages release bench bench-real bench-vllm results gpu gpu-model gpu-status gpu-tune wheels clean

# ROLLOUT=vllm generates with vLLM
ROLLOUT ?= transformers
ifeq ($(ROLLOUT),transformers)
demo: $(VENV)/.report
	$(BIN)/python -m grpo_trainer.demo --out runs/demo
else
demo:
	tests/vllm/install.sh .venv-vllm $(PYTHON)
	PYTHONPATH=. .venv-vllm/bin/python -m grpo_trainer.demo --rollout $(ROLLOUT) --out runs/demo-$(ROLLOUT)
endif

# train a pretrained model on two tasks and print a report; QUICK=1 runs three steps, OPTIONS are passed to grpo-train
real: $(VENV)/.report
	@.ci/install_real.sh .venv-real $(BIN)/python
	PYTHONPATH=. .venv-real/bin/python docs/examples/real/smollm.py --out runs/real$(if $(QUICK),-quick --quick) $(OPTIONS)

# all parts, and a summary
test: announce-test $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.everything $(PYTHON)

announce-test:
	@echo "make test: about 45 minutes on two free cores, and 7 GB in six environments."
	@echo "make test-main runs the largest part, kernels and trainer: about 15 minutes, and 2.8 GB in $(VENV)."

# everything that needs only .venv
test-main: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not long"

# tests marked long, such as compiling kernels for GPUs, all benchmarks, and examples that train
test-long: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m long

# the everyday loop: skips Triton's interpreter and the slowest tests
test-fast: $(VENV)/.dev
	OMP_NUM_THREADS=1 TRITON_INTERPRET=0 $(BIN)/python -m pytest -n 2 -m "not slow and not long" tests

# the oldest supported torch, in its own environment; prints a notice if it can't be installed
test-torch: $(VENV)/.dev
	tests/torch_compat.sh .venv-torch $(BIN)/python

# the native kernels under AddressSanitizer and UndefinedBehaviorSanitizer; prints a notice if g++
# has no sanitizers
test-sanitized: $(VENV)/.dev
	tests/sanitized/run.sh build/sanitized $(BIN)/python

# the Triton kernels as AMD machine code, in tinygrad's emulator: from the checkout in TINYGRAD, or
# fetched; prints a notice if tinygrad or clang is missing
test-emulated: $(VENV)/.dev
	TINYGRAD="$(TINYGRAD)" tests/emulated/run.sh build/tinygrad $(BIN)/python

# the main tests and the vLLM tests with the newest packages on the index, in separate
# environments; torch stays at the version in constraints.txt
test-newest:
	tests/newest.sh .venv-newest .venv-vllm-newest $(PYTHON)

# real DeepSpeed, in its own environment; prints a notice if it can't be installed
test-sharded: $(VENV)/.dev
	tests/sharded/run.sh .venv-deepspeed $(BIN)/python

# the example with a pretrained model; skipped, with a notice, if its packages cannot be installed
test-real: $(VENV)/.dev
	tests/real/run.sh .venv-real $(BIN)/python

# adapters for other trainers, with the real trainers, each in its own environment; prints a notice
# if one can't be installed
test-integrations: $(VENV)/.dev
	tests/integrations/run.sh .venv-hosts $(BIN)/python

# real vLLM, in its own environment; prints a notice if it can't be installed
test-vllm:
	tests/vllm/run.sh .venv-vllm $(PYTHON)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layering.py

# build the documentation site into build/site; a broken link or anchor is an error
docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict
	@echo "open this in a browser: $(CURDIR)/build/site/index.html"

# serve the site on http://127.0.0.1:8000 and rebuild it when a page changes
docs-serve: $(VENV)/.docs
	$(BIN)/python -m mkdocs serve

# build the sdist and the wheel into dist and check each in a separate environment
packages:
	.ci/check_packages.sh $(PYTHON)

# make release VERSION=X.Y.Z: check, build packages and tag; prints the push command that publishes
release:
	@.ci/release.sh $(PYTHON) $(VERSION)

bench: $(VENV)/.dev
	$(BIN)/python -m pytest benchmarks --benchmark-only --full --results benchmarks/results; \
	status=$$?; $(BIN)/python -m benchmarks.report --documents; exit $$status

# generation and weight updates by engine: the part of bench that needs real vLLM
bench-vllm: $(VENV)/.dev
	tests/vllm/install.sh .venv-vllm $(PYTHON)
	.venv-vllm/bin/python -m pip --disable-pip-version-check install --quiet pandas pytest-benchmark tabulate
	PYTHONPATH=. .venv-vllm/bin/python -m pytest benchmarks/test_rollouts.py --benchmark-only --full \
		--results benchmarks/results; status=$$?; $(BIN)/python -m benchmarks.report --documents; exit $$status

# train a pretrained model next to TRL and measure on its softmax: hours on two cores
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

# update tables, plots and the numbers in README and docs from the result files
results: $(VENV)/.dev
	$(BIN)/python -m benchmarks.report --documents

# run GPU jobs that have no result for the current kernels, as many as fit into LIMIT seconds (default 285);
# JOBS="heads bits" selects jobs. Results go to OUT (default benchmarks/results); call it again to continue.
gpu:
	@PYTHONPATH=. $(PYTHON) -m benchmarks.gpu $(JOBS)

# list the GPU jobs, what each decides, and which have a result for the current kernels; needs no GPU
gpu-status:
	@PYTHONPATH=. $(PYTHON) -m benchmarks.gpu --status $(JOBS)

# time the kernels with all tile sizes; put the best into grpo_kernels/backends/gpu_tiles.py
gpu-tune:
	PYTHONPATH=. $(PYTHON) -m pytest -p no:cacheprovider -o addopts= benchmarks/test_tiles.py --benchmark-only \
	    --suite=gpu-full "--results=$${OUT:-benchmarks/results}"

# download the baselines for make gpu on a machine without network; copy the folder there. Add the (large) CuTe DSL
# baselines with BASELINES="benchmarks/baselines.txt benchmarks/baselines-hopper.txt".
BASELINES ?= benchmarks/baselines.txt
WHEELS_PYTHON ?= 3.12
WHEELS_PLATFORMS := _2_28 _2_27 _2_24 _2_17 2014 1
wheels:
	rm -rf wheels
	$(PYTHON) -m pip download --disable-pip-version-check --no-deps --only-binary=:all: \
		--implementation cp --python-version $(WHEELS_PYTHON) \
		$(WHEELS_PLATFORMS:%=--platform manylinux%_x86_64) \
		-d wheels $(BASELINES:%=-r %)

# download the pretrained model and its tasks for make gpu
gpu-model: $(VENV)/.report
	@.ci/install_real.sh .venv-real $(BIN)/python
	PYTHONPATH=. .venv-real/bin/python -m benchmarks.gpu.model

$(VENV)/.torch: constraints.txt
	@.ci/check_python.sh $(PYTHON)
	@echo "installing torch, triton, transformers ... into $(VENV): about 2.8 GB (CUDA: 7 more), 2 to 10 minutes"
	@$(PYTHON) -m venv $(VENV)
	@.ci/install_torch.sh $(BIN)/python $(TORCH)
	@touch $@

# rebuild the environment when a source file changes
NATIVE := setup.py pyproject.toml grpo_kernels/common/version.py $(wildcard csrc/*)

# [dev] contains [report] and [docs]
$(VENV)/.report $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: $(VENV)/.torch $(NATIVE)
	@echo "installing grpo-kernels[$*] into $(VENV); compiles the CPU kernels if they have changed: up to a minute"
	@$(PIP) install $(QUIET) -c constraints.txt -e ".[$*]"
	@if [ -f grpo_kernels/_native.so ]; then echo "native CPU kernels: built"; else \
		echo "native CPU kernels: not built, pure PyTorch is used; install g++, run touch setup.py, and try again"; fi
	@touch $@ $(if $(filter dev,$*),$(VENV)/.report $(VENV)/.docs)

clean:
	rm -rf $(VENV) .venv-real .venv-vllm-real .venv-triton .venv-torch .venv-vllm .venv-deepspeed .venv-hosts .venv-newest \
		.venv-vllm-newest build dist real-model runs *.egg-info
