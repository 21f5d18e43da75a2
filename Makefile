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
.PHONY: help setup setup-test demo serve test test-all test-charts chart-files test-cluster kubernetes test-monitoring prometheus images test-images dashboards dashboard-pictures lint format bench-cpu bench-exporter loadtest clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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
	@"$(BIN)/python" -m pytest -m "not slow and not gpu and not monitoring and not cluster and not charts and not images" --ignore=tests/kernels $(PYTEST_ARGS)

test-all: setup-test prometheus kubernetes images ## every test, the slow ones included
	@"$(BIN)/python" -m pytest tests/kernels
	@"$(BIN)/python" -m pytest --ignore=tests/kernels $(PYTEST_ARGS)

# The dashboards and rules are tried on a real Prometheus, Debian's 2.42.
prometheus:
	@command -v prometheus >/dev/null && command -v promtool >/dev/null || { \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	            apt-get install -y -qq --no-install-recommends prometheus >/dev/null; \
	    else \
	        echo "prometheus and promtool are needed: apt-get install prometheus" >&2; exit 1; \
	    fi; }

test-monitoring: setup prometheus ## metrics, rules and dashboards on a real Prometheus with two real servers
	@"$(BIN)/python" -m pytest -m "not slow" tests/monitoring $(PYTEST_ARGS)

# Helm, kubectl and the checkers are fetched by pin into a cache folder outside the checkout.
test-charts: setup ## render the chart with Helm 3 and 4; schemas of Kubernetes 1.25 to 1.37, checkov, hadolint
	@"$(BIN)/python" -m pytest -m charts tests/tooling tests/charts $(PYTEST_ARGS)

chart-files: setup ## write the chart's copies, its table of values and the presets' renders anew
	@"$(BIN)/python" -m charts.generate
	@"$(BIN)/python" -m tests.charts.golden

dashboards: setup ## write the Grafana dashboards' JSON anew
	@"$(BIN)/python" -m monitoring.dashboards

dashboard-pictures: setup prometheus ## draw the dashboards in docs/ from real traffic
	@"$(BIN)/python" -m tests.monitoring.pictures

# The base is made of Debian packages, and the CUDA image's layer is built on vLLM's CPU build: no registry is needed.
images: setup ## build the container images with buildah
	@"$(BIN)/python" -m images.base >/dev/null
	@"$(BIN)/python" -m images.build --base local --engine-base stand-in

test-images: images ## run the images as a strict cluster does: any user, nothing writable
	@"$(BIN)/python" -m pytest -m images tests/images $(PYTEST_ARGS)

# The API server is built from Debian's source, once, into a cache folder outside the checkout.
kubernetes: setup
	@"$(BIN)/python" -m tests.cluster.prepare

test-cluster: setup kubernetes ## the exporter on a real Kubernetes API server; builds it the first time, minutes
	@"$(BIN)/python" -m pytest -m cluster tests/cluster $(PYTEST_ARGS)

bench-exporter: setup ## processor time of the exporter over 500 engines
	@"$(BIN)/python" -m benchmarks.exporter_load

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
