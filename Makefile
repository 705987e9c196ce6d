# Every command of the project; `make help` lists them.
SHELL := /bin/bash
# Every recipe's shell starts by reading env.sh: the private environment, all state inside the checkout.
export BASH_ENV := $(CURDIR)/env.sh
.DEFAULT_GOAL := help
PYTHON ?= python3
TESTS ?= tests
P99_MS ?= 50
LOAD ?= --connections 32

.venv/.complete: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
	  || { echo "error: $$($(PYTHON) --version) found, expected Python 3.11 or 3.12. Name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test ! -L .venv || { echo "error: .venv is a link to $$(readlink .venv); remove it, or update the environment that it points to" >&2; exit 1; }
	@echo "building the private environment in .venv (about 3 minutes and 7 GB, once)"
	$(PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install --disable-pip-version-check --quiet --require-hashes -r requirements.lock
	@touch $@

.PHONY: help
help: ## list these commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 24

.PHONY: install
install: .venv/.complete ## build the private environment in .venv

.PHONY: demo
demo: install ## run the whole pipeline on the embedded digits and print what came out
	dvc repro
	@python -m slipway.reports.summary

.PHONY: serve
serve: install ## start the service on 127.0.0.1:3000, with the settings in serving.env if there are any
	set -a; test ! -f serving.env || . ./serving.env; exec bentoml serve

.PHONY: release
release: install ## make the certified bundle the released one, for evaluate.released to compare with
	@python -m slipway.export.release

.PHONY: doctor
doctor: install ## say where the time of a training step goes, and what would make it shorter
	@python -m slipway.doctor.doctor

.PHONY: ladder
ladder: install ## measure what each step from a naive training to ZeRO-2 gains here
	python -m bench.ladder

.PHONY: plan
plan: install ## predict memory, disk and time of the training in params.yaml, and what does not fit
	@python -m slipway.planning.plan

.PHONY: tune-batch
tune-batch: install ## propose the largest and the fastest batch of a device; APPLY=--apply writes it
	@python -m slipway.planning.tuning $(APPLY) batch

.PHONY: tune-learning-rate
tune-learning-rate: install ## propose a learning rate by a range test; APPLY=--apply writes it
	@python -m slipway.planning.tuning $(APPLY) learning-rate

.PHONY: tune-serving
tune-serving: install ## find what the service carries here, within P99_MS at LOAD; APPLY=--apply writes the settings into serving.env
	@python -m serving.load_test --p99-ms $(P99_MS) $(LOAD) $(APPLY)

.PHONY: test
test: install ## run the tests: every rule, real processes
	python -m pytest -m 'not exhaustive' $(TESTS)

.PHONY: exhaustive
exhaustive: install ## run further cases of the slow rules too: an hour
	python -m pytest $(TESTS)

.PHONY: lint
lint: install ## formatting, lint and types
	ruff format --check .
	ruff check .
	mypy

.PHONY: check
check: lint ## formatting, lint, types and the fast tests: run it before every commit
	python -m pytest -m 'not slow and not gpu and not exhaustive' $(TESTS)

.PHONY: format
format: install ## format the code and mend what lint can mend
	ruff format .
	ruff check --fix .

.PHONY: deps
deps: install ## write each stage's import closure into dvc.yaml
	python -m tests.structure.closure

.PHONY: hooks
hooks: install ## run `make check` before each commit from now on
	pre-commit install

.PHONY: lock
lock: install ## resolve requirements.lock anew from pyproject.toml
	uv pip compile pyproject.toml --universal --python-version 3.11 --extra train --extra cluster --extra export --extra serve --extra dev \
	  --generate-hashes --no-annotate --custom-compile-command "make lock" --quiet --output-file requirements.lock

.PHONY: clean
clean: ## remove what stages wrote and all work in progress; the data, dvc's cache, .venv and the released bundle stay
	rm -rf .work .bentoml tmp dvc_plots data/clean data/split data/packed data/augmented reports
	test ! -d artifacts || find artifacts -mindepth 1 -maxdepth 1 ! -name 'released*' -exec rm -rf {} +
