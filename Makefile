# Everything a user or a developer types; docs/building.md explains each line.
PYTHON ?= python3
PYTEST_ARGS ?=
ARGS ?=
SETUP := @$(PYTHON) scripts/setup_env.py
# Kernels on a simulator are compiled anew for each planted fault: they are tested apart.
SIMULATED := tests/test_moe_simt.py tests/test_plan_simt.py
# What depends on the version of Python or jax in GPU tests on CPU devices is tested elsewhere too.
ONCE := --ignore=tests/gpu

.PHONY: setup prefill test test-oldest test-newest test-slow lint format sanitize bazel mutants cuda test-gpu wheels bench docs-tables clean help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: ## .venv with the package and everything it needs (does nothing when nothing changed)
	$(SETUP) oldest

prefill: setup ## a trained MoE reads text on eight ranks, rebalanced at every layer
	@.venv/bin/jax-iser prefill $(ARGS)

test: test-oldest test-newest ## the suite on the oldest and on the newest Python and jax

test-oldest: setup
	@scripts/test.sh .venv $(SIMULATED:%=--ignore=%) $(PYTEST_ARGS)

test-newest: setup
	$(SETUP) newest
	@scripts/test.sh .venv-newest $(SIMULATED:%=--ignore=%) $(ONCE) $(PYTEST_ARGS)

test-slow: setup ## the kernels' code on a simulator, with its planted faults
	@scripts/test.sh .venv $(SIMULATED) $(PYTEST_ARGS)

lint: setup ## formatting, lint and types, without changing a file
	@scripts/check.sh

format: setup ## formats every source
	@scripts/check.sh --fix

sanitize: ## C++ tests under ASan, UBSan and TSan, after the sanitizers caught planted faults
	@$(PYTHON) scripts/sanitize.py

bazel: setup ## the same targets by Bazel 4 or later: libraries, extensions, C++ tests
	@scripts/bazel.sh

mutants: setup ## plants faults in a copy of the sources, one by one: the tests must see each; ARGS=words
	@.venv/bin/python scripts/mutants.py $(ARGS)

cuda: setup ## the CUDA extension beside the sources, and its programs; needs nvcc, no GPU
	@scripts/build_cuda.sh

test-gpu: ## builds the CUDA extension for PYTHON and runs tests/gpu on this machine's GPUs
	@PYTHON=$(PYTHON) scripts/test_gpu.sh $(PYTEST_ARGS)

wheels: ## one wheel for each Python 3.11 to 3.13 found, in dist/
	@$(PYTHON) scripts/build_wheels.py

bench: setup ## the benchmarks; JSON in build/bench/
	@mkdir -p build/bench
	@set -e; for file in benchmarks/bench_*.py; do \
	  name=$$(basename $$file .py); echo "== $$name"; \
	  .venv/bin/python $$file --json build/bench/$$name.json --allow-dirty $(ARGS); done

docs-tables: setup ## the tables and figures in README.md and docs/, from benchmarks/results
	@.venv/bin/python benchmarks/tables.py

clean: ## removes what was built, and the environments
	rm -rf build dist .venv .venv-newest .pytest_cache .hypothesis .mypy_cache .ruff_cache
	rm -f jax_iser/*.so jax_iser/models
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
