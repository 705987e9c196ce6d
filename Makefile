# Every command of the project; `make help` lists them.
SHELL := /bin/bash
# Recipes find the private environment as a shell does after `source .venv/bin/activate`.
GIVEN_PATH := $(PATH)
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export VIRTUAL_ENV := $(CURDIR)/.venv
export BENTOML_HOME ?= $(CURDIR)/.bentoml
.DEFAULT_GOAL := help
PYTHON ?= python3
TESTS ?= tests
# One process more than cores: some tests wait for a socket, a disk or a process.
ON_EVERY_CORE = --numprocesses $$(($$(nproc) + 1)) --dist loadfile

.PHONY: install
install: ## build the private environment in .venv, with this project in it
	@bash install.sh "$(PYTHON)" $(MAKECMDGOALS)

.PHONY: help
help: ## list these commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 24

.PHONY: demo
demo: export PATH := $(GIVEN_PATH) # its last lines say if the shell lacks `slipway`
demo: install ## run the whole pipeline on the embedded digits and print what came out
	.venv/bin/slipway run

.PHONY: serve
serve: install ## start the service on 127.0.0.1:3000, with the settings in serving.env if there are any
	set -a; test ! -f serving.env || . ./serving.env; exec bentoml serve

.PHONY: ladder
ladder: install ## measure what each step from a naive training to ZeRO-2 gains here
	python -m bench.ladder

.PHONY: test
test: install ## run the unit and process tiers of the tests: every rule, with real processes
	python -m pytest -m unit $(ON_EVERY_CORE) $(TESTS)
	python -m pytest -m process $(ON_EVERY_CORE) $(TESTS)

.PHONY: nightly
nightly: install ## run the nightly tier: further cases, load, measured times; 4 to 6 hours
	python -m pytest -m nightly $(TESTS)

.PHONY: nightly-slice
nightly-slice: install ## run 4 minutes of the nightly tier, chosen by the commit
	python -m pytest -p tests.nightly_slice -m nightly $(TESTS)

.PHONY: lint
lint: install ## formatting, lint, types, and the rules for texts
	ruff format --check .
	ruff check .
	mypy
	python -m pytest -q -m unit tests/structure/test_prose.py

.PHONY: check
check: lint ## formatting, lint, types and the unit tier: run it before every commit
	python -m pytest -m unit $(ON_EVERY_CORE) $(TESTS)

SITE = .work/site
.PHONY: site
site: install ## the docs as static pages in .work/site/html; without a network; each link is checked
	rm -rf $(SITE) && mkdir -p $(SITE)/pages
	git ls-files '*.md' '*.yaml' LICENSE docs bench/results | xargs cp --parents --target-directory $(SITE)/pages
	sphinx-build --fail-on-warning --keep-going --quiet -c docs $(SITE)/pages $(SITE)/html
	cp $(SITE)/html/README.html $(SITE)/html/index.html

.PHONY: release
release: site ## build the release in dist/ and try it; says what a person has still to do
	@.ci/release

.PHONY: params-page
params-page: install ## write docs/reference/params.md from the sections of params.yaml
	python -m slipway.cli.documentation > $(SITE).params && mv $(SITE).params docs/reference/params.md

.PHONY: house
house: install ## print rooms, arrows, largest modules and the figures of the code
	@python -m tests.structure.house

.PHONY: format
format: install ## format the code and mend what lint can mend
	ruff format .
	ruff check --fix .

.PHONY: hooks
hooks: install ## run `make check` before each commit from now on
	pre-commit install

COMPILE = uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command "make lock" --quiet
# torch imports without these: Triton compiles for GPUs, and CUDA's wheels are useless without one.
ONLY_ON_A_GPU = triton nvidia-cusolver nvidia-nvtx cuda-bindings cuda-pathfinder cuda-toolkit

.PHONY: lock
lock: install ## resolve requirements.lock anew from pyproject.toml, and from it the other locks
	$(COMPILE) pyproject.toml --extra train --extra ray --extra loggers --extra encoders --extra export --extra grpc --extra tracing --extra postgres --extra sign --extra weights --extra serve --extra dev --output-file requirements.lock
	$(COMPILE) requirements.lock --no-deps $(addprefix --no-emit-package ,$(ONLY_ON_A_GPU)) --output-file requirements.cpu.lock
	for device in cpu gpu grpc tracing postgres; do \
	  $(COMPILE) --group "pyproject.toml:bento-$$device" --constraint requirements.lock --only-binary :all: \
	    --output-file "launch/requirements.$$device.lock" || exit; \
	done

.PHONY: clean
clean: ## remove what stages wrote and all work in progress; the data, dvc's cache, .venv and the reference model stay
	rm -rf .work .bentoml tmp dvc_plots data/clean data/split data/packed data/augmented reports
	test ! -d artifacts || find artifacts -mindepth 1 -maxdepth 1 ! -name 'reference_model*' -exec rm -rf {} +
