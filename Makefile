# Everything a contributor runs. `make help` lists it; the first call of any other target sets up .venv.

PYTHON ?= python3
# Installed first. On x86 PyPI has only the CUDA build, of some GB even for a machine without a GPU. The CPU build:
#   make TORCH="torch==2.13.0 --index-url URL"
TORCH ?= torch==2.13.0
# Extras of the package that are installed; `kernels` adds what the agent's kernel is tested with without a GPU.
EXTRAS ?= dev,transformers,demo
# Test processes at the same time; more than cores only makes them wait for each other.
JOBS ?= 2

BUF_VERSION := 1.75.0

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS_VENV := .venv-peers
PEERS_INSTALLED := $(PEERS_VENV)/.installed
BUF := $(VENV)/buf/$(BUF_VERSION)/node_modules/.bin/buf
PROTOS := $(wildcard proto/kvstore/v1/*.proto)
CODE := kvstore kvstore_client kvstore_server gpu_agent
# Messages and their types only: gRPC methods are called through kvstore/wire.py.
PROTOC = $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(1) --pyi_out=$(1) $(PROTOS)
# One thread per test process, or torch and BLAS put two threads on every core in each of them.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
MAKEFLAGS += --no-print-directory --no-builtin-rules
.SHELLFLAGS := -euc
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help install demo test soak bench bench-peers lint format types imports proto proto-check docs docs-check ci clean

help: ## this list
	@echo "usage: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## .venv with the package, its extras and every tool used here

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is older than 3.11 or missing; name another: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || { echo "==> .venv: creating"; $(PYTHON) -m venv $(VENV); } || { \
		echo "venv failed; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "==> .venv: pip and $(firstword $(TORCH)) (200 MB as a CPU build, some GB with CUDA)"
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet $(TORCH)
	@echo "==> .venv: this package with its dev, transformers and demo extras (about 900 MB, some minutes)"
	@$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	@touch $@

demo: $(INSTALLED) ## the whole job, once, on a real model
	@$(BIN)/kvstore demo

test: $(INSTALLED) ## every test that can run on this machine
	@echo "==> tests, $(JOBS) at a time"
	@$(PYTEST) -q -m "not soak" -n $(JOBS) --dist loadfile

soak: $(INSTALLED) ## the long tests
	@$(PYTEST) -m soak --timeout 3600

bench: $(INSTALLED) ## this machine's speed: blocks, lookups, this folder's disk, hashing a prompt, starting the daemon
	@$(BIN)/kvstore bench node
	@$(BIN)/kvstore bench stream
	@$(BIN)/kvstore bench lookup
	@$(BIN)/kvstore bench nvme
	@$(BIN)/python bench/hashing.py
	@$(BIN)/python bench/startup.py

bench-peers: $(PEERS_INSTALLED) ## our speed beside Redis, memcached, LMCache, Mooncake; writes bench/results, docs/peers.svg
	@$(PEERS_VENV)/bin/python bench/peers/run.py --out bench/results/peers.json
	@$(PEERS_VENV)/bin/python bench/peers/plot.py bench/results/peers.json docs/peers.svg

$(PEERS_INSTALLED): pyproject.toml bench/peers/requirements.txt
	@test -x $(PEERS_VENV)/bin/python || $(PYTHON) -m venv $(PEERS_VENV)
	@echo "==> $(PEERS_VENV): this package, $(firstword $(TORCH)) and the peers' packages (1.6 GB, some minutes)"
	@$(PEERS_VENV)/bin/python -m pip install --quiet --upgrade pip
	@$(PEERS_VENV)/bin/python -m pip install --quiet $(TORCH)
	@$(PEERS_VENV)/bin/python -m pip install --quiet --editable . --requirement bench/peers/requirements.txt
	@$(PEERS_VENV)/bin/python -m pip install --quiet --no-deps lmcache==0.5.6
	@touch $@

lint: $(INSTALLED) ## formatting and lint
	@echo "==> ruff"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

format: $(INSTALLED) ## formats, and fixes what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

types: $(INSTALLED) ## mypy --strict
	@echo "==> mypy"
	@$(BIN)/mypy $(addprefix -p ,$(CODE))

imports: $(INSTALLED) ## who may import whom
	@echo "==> import-linter"
	@$(BIN)/lint-imports --no-logo

proto: $(INSTALLED) ## stubs from proto/kvstore/v1/*.proto
	@$(call PROTOC,proto)

proto-check: $(INSTALLED) $(BUF) ## buf lint; committed stubs are what protoc makes
	@echo "==> buf lint"
	@$(BUF) lint
	@echo "==> stubs"
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; $(call PROTOC,$$fresh); \
	diff -ru --exclude='*.proto' --exclude=__init__.py --exclude=__pycache__ "$$fresh/kvstore/v1" proto/kvstore/v1 \
		|| { echo "the committed stubs are not what protoc makes: run make proto"; exit 1; }

$(BUF): | $(INSTALLED)
	@command -v npm >/dev/null || { \
		echo "buf comes from npm, and there is none: install Node.js (Debian: apt-get install npm)"; exit 1; }
	@echo "==> buf $(BUF_VERSION) (once)"
	@mkdir -p $(VENV)/buf/$(BUF_VERSION)
	@npm install --silent --no-audit --no-fund --prefix $(VENV)/buf/$(BUF_VERSION) @bufbuild/buf@$(BUF_VERSION)

docs: $(INSTALLED) ## docs/configuration.md and docs/metrics.md from the code
	@$(BIN)/python docs/generate.py

docs-check: $(INSTALLED) ## the generated docs are up to date
	@echo "==> docs"
	@$(BIN)/python docs/generate.py --check

ci: lint types imports proto-check docs-check test ## all gates and tests, as CI runs them

clean: ## removes what the targets above made
	rm -rf $(VENV) $(PEERS_VENV) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
