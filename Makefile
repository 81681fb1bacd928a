# Every target does all of its own set-up: a virtual environment in .venv, pinned
# packages, generated protobuf code, and a tiny model. Stamps make later runs skip
# what is done. `make help` lists the targets.

.NOTPARALLEL:
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Interpreter that .venv is made from; 3.11 or newer.
PYTHON ?= python3
# Model to serve: a folder or a hub name. The default is made here.
MODEL ?= .models/tiny
# Build of vLLM: cuda with an NVIDIA GPU, otherwise cpu.
ENGINE ?= $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo cuda || echo cpu)
# Stacks of docker-compose.yml that `make test-compose` runs: sim, cpu or both.
PROFILES ?= sim
# Tests at once, of those that use no real engines; many of them wait more than they work.
JOBS ?= $(shell echo $$(($$(nproc) + 1)))
# Further arguments: `make test ARGS='-k ledger'`, `make up ARGS='--prefill 2'`.
ARGS ?=

VENV := .venv
STAMPS := $(VENV)/stamps
BUF_VERSION := 1.75.0
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
PINS := -r requirements/kvloop.txt -r requirements/dev.txt
PROTOS := $(shell find protos -name '*.proto')

# protoc finds its plugins, and child processes find this Python, on the path.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: help demo up test test-fast test-engine test-versions test-compose lint protos setup clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12
	@echo
	@echo "Variables: MODEL=$(MODEL) ENGINE=$(ENGINE) PYTHON=$(PYTHON) ARGS=$(ARGS)"

demo: setup ## one conversation with reuse off and on, in a table (about 2 minutes)
	kvloop demo --model '$(MODEL)' $(ARGS)

up: setup ## a whole stack on this machine, until Ctrl-C
	kvloop up --model '$(MODEL)' $(ARGS)

test: setup ## all tests, those on real engines included; with ARGS, some of them
ifeq ($(ARGS),)
	@$(MAKE) --no-print-directory --keep-going test-fast test-engine
else
	python -m pytest $(ARGS)
endif

# Random cases of the gateway's fuzz tests; 10,000 take about 30 s.
test-fast: export KVLOOP_FUZZ_CASES ?= 10000
test-fast: setup ## all tests but those on real engines
	python -m pytest -n $(JOBS) --dist worksteal --ignore=tests/engine $(ARGS)

test-engine: setup ## the tests on real engines
	python -m pytest tests/engine $(ARGS)

test-compose: setup ## images, stacks of containers, kills and restarts (sim: 7 minutes)
	for profile in $(PROFILES); do \
	  KVLOOP_COMPOSE_PROFILE=$$profile python -m pytest tests/compose \
	    -o log_cli=true --log-cli-level=INFO $(ARGS); \
	done

test-versions: setup ## the connector against the sources of other vLLM versions
	KVLOOP_VLLM_SOURCES=$$(.ci/vllm-sources) python -m pytest -n $(JOBS) tests/versions $(ARGS)

lint: setup .tools/buf-$(BUF_VERSION) ## formatting, style, types, protos, import rules
	ruff format --check
	ruff check
	mypy
	lint-imports
	.ci/lint-protos

protos: $(STAMPS)/engine-$(ENGINE) ## generate the protobuf code again
	python hatch_build.py

setup: $(STAMPS)/protos $(if $(filter .models/tiny,$(MODEL)),.models/tiny/kvloop-tiny-model.json)

clean: ## remove everything that make made
	rm -rf .venv .models .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find kvloop -name '*_pb2.py*' -delete -o -name '*_pb2_grpc.py*' -delete

$(STAMPS)/venv:
	.ci/preflight '$(PYTHON)' $(ENGINE)
	rm -rf $(VENV)
	'$(PYTHON)' -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

# Why --no-deps, and why torch comes last: see the head of engine-cpu.txt.
$(STAMPS)/engine-cpu: requirements/engine-cpu.txt requirements/kvloop.txt requirements/dev.txt $(STAMPS)/venv
	@echo "installing vLLM for the CPU and everything else, about 2.5 GB; 3 to 4 minutes"
	$(PIP) install --no-deps -r requirements/engine-cpu.txt $(PINS) 2>&1 | .ci/pip-progress
	$(PIP) install -c requirements/engine-cpu.txt torch 2>&1 | .ci/pip-progress
	touch $@

$(STAMPS)/engine-cuda: requirements/engine-cuda.txt requirements/kvloop.txt requirements/dev.txt $(STAMPS)/venv
	@echo "installing vLLM for CUDA and everything else, about 10 GB"
	$(PIP) install -r requirements/engine-cuda.txt $(PINS) 2>&1 | .ci/pip-progress
	touch $@

# Installing generates the protobuf code.
$(STAMPS)/kvloop: pyproject.toml $(STAMPS)/engine-$(ENGINE)
	$(PIP) install --no-deps --no-build-isolation --editable . 2>&1 | .ci/pip-progress
	touch $@

$(STAMPS)/protos: $(PROTOS) hatch_build.py $(STAMPS)/kvloop
	python hatch_build.py
	touch $@

.models/tiny/kvloop-tiny-model.json: services/worker/tiny_model.py $(STAMPS)/protos
	python -m services.worker.tiny_model .models/tiny
	touch $@

.tools/buf-$(BUF_VERSION):
	mkdir -p .tools
	if command -v npm >/dev/null; then \
	  npm install --silent --no-fund --no-audit --no-save --prefix .tools @bufbuild/buf@$(BUF_VERSION); \
	  touch $@; \
	fi
