SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := $(CURDIR)/.venv/bin
# Everything stays inside the checkout: tools write to .work, .bentoml and .dvc, never to the user's home.
export PATH := $(BIN):$(PATH)
export BENTOML_HOME := $(CURDIR)/.bentoml
export BENTOML_DO_NOT_TRACK := True
export DVC_NO_ANALYTICS := 1
export DS_BUILD_OPS := 0

.venv/.complete: requirements.lock
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --require-hashes -r requirements.lock
	touch $@

.PHONY: help
help: ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

.PHONY: install
install: .venv/.complete ## build the private environment in .venv
