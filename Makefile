# Each target sets up .venv by itself (scripts/setup.sh); a second call reuses it.
# PYTHON=/path/to/python chooses the interpreter, ARGS="..." is passed to the command that the target runs.

VENV := .venv
BENCHMARKS := $(basename $(notdir $(wildcard benchmarks/bench_*.py)))
OLDEST_JAX := $(shell sed -n 's/^dependencies = \["jax>=\([0-9.]*\).*/\1/p' pyproject.toml)
export PYTHON JAX_VERSION

.PHONY: help demo serve test test-all test-oldest lint format docs docs-links bench gallery lock clean
.NOTPARALLEL:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## a real model writes the same texts, bit for bit, alone and in batches (ARGS="--quick")
	@sh scripts/setup.sh $(VENV) demo
	$(VENV)/bin/python -m bijax demo $(ARGS)

serve: ## serve a real model over HTTP (ARGS="--port 8000 --model PATH")
	@sh scripts/setup.sh $(VENV) demo serve
	$(VENV)/bin/python -m bijax serve $(ARGS)

test: ## run the tests (ARGS="-k matmul", ARGS="-m gpu")
	@sh scripts/setup.sh $(VENV) demo test
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

test-all: ## run the tests with the exhaustive sweeps
	@$(MAKE) test ARGS="--exhaustive $(ARGS)"

test-oldest: ## run the tests with the oldest version of JAX that is supported, in .venv-oldest
	@$(MAKE) test VENV=.venv-oldest JAX_VERSION=$(OLDEST_JAX)

lint: ## ruff and mypy
	@sh scripts/setup.sh $(VENV) demo test dev
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy

format: ## let ruff rewrite the sources
	@sh scripts/setup.sh $(VENV) demo test dev
	$(VENV)/bin/python -m ruff check --fix-only .
	$(VENV)/bin/python -m ruff format .

docs: ## build the documentation into build/docs; warnings are errors
	@sh scripts/setup.sh $(VENV) docs
	$(VENV)/bin/python -m sphinx -b html -W --keep-going -q docs build/docs $(ARGS)
	@echo "open build/docs/index.html"

docs-links: ## check every external link of the documentation
	@sh scripts/setup.sh $(VENV) docs
	$(VENV)/bin/python -m sphinx -b linkcheck -q docs build/docs-links

bench: ## run the benchmarks (BENCHMARKS=bench_matmul for one)
	@sh scripts/setup.sh $(VENV) demo bench
	@set -e; for name in $(BENCHMARKS); do echo "$$name"; $(VENV)/bin/python -m benchmarks.$$name $(ARGS); done

gallery: ## run other libraries' programs, and write their figures into the documentation
	@sh scripts/setup.sh $(VENV) gallery
	$(VENV)/bin/python -m benchmarks.gallery $(ARGS)

lock: ## resolve the newest versions of all dependencies into constraints.txt
	@python=$$(sh scripts/find_python.sh) && "$$python" scripts/lock.py

clean: ## remove the environment and the caches
	rm -rf $(VENV) .venv-oldest build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
