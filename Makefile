# Every target sets up what it needs: a private .venv, made once and renewed when pyproject.toml changes.
# `make PYTHON=python3.12 test` picks another interpreter for a new .venv; `make test ARGS="-k gates"` passes arguments on.

PYTHON ?= python3
JOBS ?= 3
ARGS ?=

BIN := .venv/bin
READY := .venv/.stamp-dev

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test learn check format-check lint layers types bench fmt clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	$(PYTHON) -m venv .venv

$(READY): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[dev]"
	@touch $@

demo: $(READY) ## one network that grows, beside the fixed sizes that it replaces, at equal compute
	$(BIN)/esper study examples/demo_study.toml --out runs/demo

test: $(READY) ## the test suite, JOBS processes of one thread each: one more than cores, since some wait
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --ignore=tests/learning $(ARGS)

learn: $(READY) ## policies learn every oracle environment; a few minutes
	$(BIN)/python -m pytest tests/learning -n $(JOBS) --dist worksteal $(ARGS)

check: format-check lint layers types ## format, lint, layers, types: changes nothing

format-check: $(READY)
	$(BIN)/ruff format --check .

lint: $(READY)
	$(BIN)/ruff check .

layers: $(READY)
	$(BIN)/lint-imports --no-logo

types: $(READY)
	$(BIN)/mypy

bench: $(READY) ## ratios of speed with their limits; one process, one thread
	$(BIN)/esper bench $(ARGS)

fmt: $(READY) ## format, and repair what lint can repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove caches and build products; keeps .venv and runs
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find src tests tools benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
