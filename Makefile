# `make help` lists what a person types. A fresh machine needs python >= 3.11, make and git, nothing else.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup programs containers-preflight demo demo-local demo-containers cluster-up cluster-down reclaim restore lint format \
	docs test-fast test test-chart test-heavy test-containers test-with bench wheel release golden clean

ifeq ($(PATH),)  # env -i: the shell finds programs by itself, and others that we start do not
export PATH := /usr/local/bin:/usr/bin:/bin
endif

PY := .venv/bin/python
TOO_OLD := error: spottrain needs Python 3.11 or newer as python3 on PATH, and this one is
SETUP := @python3 -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(TOO_OLD) " + sys.version.split()[0])' \
	&& python3 dev/setup.py
SOURCES := operator runtime cli dev bench examples tests
PROCESSES := PYTHONPATH=dev $(PY) -m processcluster
PYTEST := $(PY) -m pytest

help:
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  \033[1m%-16s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(if $(filter existing,$(CLUSTER)),setup,programs) ## see it: a spot node is taken away midway through a training, on a real Kubernetes without root
	@PYTHONPATH=dev $(PY) -m demo

demo-local: setup ## the same without a cluster, in one minute: SIGTERM, resume, equal weights
	@$(PY) dev/demo_local.py

demo-containers: containers-preflight setup ## the demo with real kubelets and containers (root, Debian, 25 GB, 25 minutes)
	@CLUSTER=$${CLUSTER:-containers} PYTHONPATH=dev $(PY) -m demo

cluster-up: programs ## the demo's cluster to play with, spottrain installed; says how to go on
	@$(PROCESSES) up

cluster-down: setup ## end it, and delete what was on it
	@$(PROCESSES) down

reclaim restore: setup # NODE=spot-a: a notice for it, or a fresh machine of that name
	@$(PROCESSES) $@ $(or $(NODE),spot-a)

setup: ## the locked Python environment in .venv (6 GB)
	$(SETUP) environment

programs:
	$(SETUP) programs

lint: setup ## ruff, mypy --strict, import-linter
	$(PY) -m ruff format --check $(SOURCES)
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m mypy
	.venv/bin/lint-imports

format: setup # let ruff rewrite the code
	$(PY) -m ruff check --fix $(SOURCES)
	$(PY) -m ruff format $(SOURCES)

test-fast: setup ## unit and contract tests (3 minutes)
	$(PYTEST) -n 2 --dist loadfile -m "not heavy" tests/unit tests/contract

test: programs ## all that needs no more than the demo does (10 minutes; 15 the first time)
	@PYTHONPATH=dev $(PY) dev/run_tests.py

test-chart: programs ## the chart by Helm 3 and 4, and a release (builds Helm 3 and a registry once, 4 minutes)
	$(PYTEST) -n 2 --dist loadfile tests/chart

test-heavy: programs ## what `make test` leaves out: compile, whole matrices, rarer cases, Google Cloud Storage (18 minutes)
	@PYTHONPATH=dev $(PY) -c 'from localcluster import binaries, layout; binaries.ensure(layout.default_paths(), {"fake-gcs-server"})'
	$(PYTEST) -n 2 --dist loadfile -m heavy tests/unit tests/contract tests/runs tests/s3 tests/api tests/nodes

test-containers: containers-preflight setup ## what needs kubelets and images (root, Debian, 25 GB, 25 minutes)
	$(PYTEST) -n 0 tests/containers

test-with: setup ## X=karpenter, kueue, prometheus, torch, frameworks, native or kubernetes: beside the real thing
	@PYTHONPATH=dev $(PY) dev/test_with.py "$(X)"

bench: setup ## NAME=checkpoint, loop, scale ...: a benchmark, recorded in bench/RESULTS.md
	@$(PY) -m bench $(NAME)

wheel: setup # dist/spottrain-VERSION-py3-none-any.whl: the runtime for an image of your own
	rm -f dist/spottrain-*.whl
	$(PY) -m hatchling build --target wheel --directory dist

release: programs ## dist/VERSION: wheels, chart, bills of materials, checksums; PUSH=oci://... pushes the chart
	@PYTHONPATH=dev $(PY) dev/release.py $(PUSH)

docs: ## the site of docs/, in out/site: broken links and anchors end it with an error
	$(SETUP) docs
	NO_MKDOCS_2_WARNING=1 .docs/bin/mkdocs build

golden: programs # renders the chart again into tests/chart/golden; read the diff
	SPOTTRAIN_RENEW_GOLDEN=1 $(PYTEST) -q -n 0 tests/chart/test_golden.py

clean: # removes what this checkout made (not the programs, which lie in ~/.cache/spottrain)
	rm -rf .venv .docs out/site .tools .torch .frameworks dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

containers-preflight: # before setup, which takes a while
	@PYTHONPATH=dev python3 -m localcluster.preflight
