# `make help` lists the targets. Every target that needs the environment sets it up first.
PYTHON ?= python3
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
DEMO_ARGS ?=
WORKLOAD ?= loadtests/workloads/files/shared_documents.toml
# The servers share this machine's cores with the generator; what they do takes seconds, so 200 ms are exact enough.
LOADTEST_ARGS ?= --max-lag 0.2
PORT ?= 8000

.DEFAULT_GOAL := help
.PHONY: help setup setup-test demo serve test test-all lint format bench-cpu loadtest clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## put the pinned CPU environment and the vllm-spans command into .venv
	@$(PYTHON) requirements/setup_env.py --venv "$(VENV)"

demo: setup ## start the real server with the embedded model and show reuse on real documents
	@"$(BIN)/python" -m demo $(DEMO_ARGS)

serve: setup ## leave the server up in the foreground, with three commands to try
	@PORT=$(PORT) "$(BIN)/python" -m demo.serve

# Triton is for the kernel tests alone, so the other targets do without its 640 MB.
setup-test:
	@$(PYTHON) requirements/setup_env.py --venv "$(VENV)" --kernels

# The kernels run in a process of their own: Triton's interpreter is chosen when it is imported.
test: setup-test ## unit and engine tests
	@"$(BIN)/python" -m pytest -m "not slow and not gpu" tests/kernels
	@"$(BIN)/python" -m pytest -m "not slow and not gpu" --ignore=tests/kernels $(PYTEST_ARGS)

test-all: setup-test ## every test, the slow ones included
	@"$(BIN)/python" -m pytest tests/kernels
	@"$(BIN)/python" -m pytest --ignore=tests/kernels $(PYTEST_ARGS)

lint: setup ## ruff and mypy
	@"$(BIN)/ruff" check .
	@"$(BIN)/ruff" format --check .
	@"$(BIN)/mypy"

format: setup ## let ruff rewrite the sources
	@"$(BIN)/ruff" check --fix .
	@"$(BIN)/ruff" format .

bench-cpu: setup ## cold, warm and stock side by side on the CPU; the scheduler's time per step
	@"$(BIN)/python" -m benchmarks.bench_cpu

loadtest: setup ## the same load on stock vLLM and on spans; an HTML report (WORKLOAD=file LOADTEST_ARGS=...)
	@"$(BIN)/python" -m loadtests compare "$(WORKLOAD)" $(LOADTEST_ARGS)

clean: ## remove the environment and what the tools left
	@rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
