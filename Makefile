# `make help` lists the targets. Every target that needs the environment sets it up first.
PYTHON ?= python3
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
DEMO_ARGS ?=
PORT ?= 8000

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-all lint format bench-cpu clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## put the pinned CPU environment and the vllm-spans command into .venv
	@$(PYTHON) requirements/setup_env.py --venv "$(VENV)"

demo: setup ## start the real server with the embedded model and show reuse on real documents
	@"$(BIN)/python" -m demo $(DEMO_ARGS)

serve: setup ## leave the server up in the foreground, with three commands to try
	@PORT=$(PORT) "$(BIN)/python" -m demo.serve

test: setup ## unit and engine tests
	@"$(BIN)/python" -m pytest -m "not slow and not gpu" $(PYTEST_ARGS)

test-all: setup ## every test, the slow ones included
	@"$(BIN)/python" -m pytest $(PYTEST_ARGS)

lint: setup ## ruff and mypy
	@"$(BIN)/ruff" check .
	@"$(BIN)/ruff" format --check .
	@"$(BIN)/mypy"

format: setup ## let ruff rewrite the sources
	@"$(BIN)/ruff" check --fix .
	@"$(BIN)/ruff" format .

bench-cpu: setup ## cold, warm and stock side by side on the CPU; the scheduler's time per step
	@"$(BIN)/python" -m benchmarks.bench_cpu

clean: ## remove the environment and what the tools left
	@rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
