# Every target is a line of `make help`. A fresh machine needs only python >= 3.11, make and git.
SHELL := /bin/bash
.DEFAULT_GOAL := help

UV_VERSION := 0.13.9
UV := $(shell command -v uv || echo .tools/bin/uv)
PY := .venv/bin/python
RECORD := $(PY) bench/record.py
WHEEL = $(CURDIR)/dist/spottrain-$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)-py3-none-any.whl
TORCH ?= 2.6.0
TORCH_PYTHON = $(or $(PYTHON),3.11)
FRAMEWORK ?= keras
FRAMEWORK_ENV = $(CURDIR)/.frameworks/$(FRAMEWORK)
TORCH_ENV = $(CURDIR)/.torch/$(TORCH)-$(notdir $(TORCH_PYTHON))
SOURCES := operator runtime dev bench examples tests

.PHONY: help setup lint format test test-fast test-native-gangs test-kubernetes test-helm-4 test-karpenter test-kueue \
	test-prometheus test-torch test-frameworks wheel test-matrix chaos-runtime chaos-operator chaos-examples demo \
	demo-local cluster-up cluster-status cluster-down binaries sync golden \
	bench-checkpoint bench-sync bench-restart bench-loop bench-techniques bench-data \
	bench-gpu bench-diagnosis bench-notice bench-failover bench-scale bench-scale-singles bench-scale-gang \
	bench-storm bench-capacity bench-soak bench-informer bench-policy bench-goodput bench-head clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  \033[1m%-19s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.tools/bin/uv:
	python3 -m pip install --quiet --root-user-action=ignore --target .tools uv==$(UV_VERSION)

.venv/.synced: pyproject.toml uv.lock README.md | $(if $(filter .tools/%,$(UV)),.tools/bin/uv)
	$(UV) sync --frozen --quiet --compile-bytecode  # else, where Python may not write, each test process compiles torch again
	@touch $@

setup: .venv/.synced ## install the locked Python environment (5 GB, torch)

lint: .venv/.synced ## ruff, mypy --strict, import-linter, generated copies in step
	$(PY) -m ruff format --check $(SOURCES)
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m mypy
	.venv/bin/lint-imports
	cmp crds/trainingjobs.yaml charts/spottrain/files/trainingjobs.yaml || { echo "the chart's CRD differs from crds/: run 'make sync'"; exit 1; }

format: .venv/.synced ## let ruff rewrite the code
	$(PY) -m ruff check --fix $(SOURCES)
	$(PY) -m ruff format $(SOURCES)

test: .venv/.synced ## all levels: unit, contract, runs, s3, api, cluster (root and Linux for the last; see dev/README.md)
	@$(PY) dev/cluster.py binaries
	@$(PY) dev/run_tests.py

test-fast: .venv/.synced ## unit and contract levels only: no cluster, no root, 2 minutes
	$(PY) -m pytest -n 2 --dist loadfile tests/unit tests/contract

test-native-gangs: .venv/.synced ## gangs by Kubernetes' own scheduler, not in `make test`: KUBERNETES=1.37.1 is built first (20 minutes)
	SPOTTRAIN_NATIVE_KUBERNETES=$(or $(KUBERNETES),1.37.1) $(PY) -m pytest tests/native

test-kubernetes: .venv/.synced ## the api level on the newest Kubernetes, not in `make test`: KUBERNETES=1.37.2 is built first (20 minutes)
	SPOTTRAIN_TEST_KUBERNETES=$(or $(KUBERNETES),1.37.2) $(PY) -m pytest tests/api

test-helm-4: .venv/.synced ## the upgrade from 0.2.0 by Helm 4 too, not in `make test` (builds it once, 4 to 10 minutes)
	SPOTTRAIN_TEST_HELM_4=1 $(PY) -m pytest -n 0 tests/api/test_helm.py

test-karpenter: .venv/.synced ## the real Karpenter with its kwok provider (root not needed; builds it once, 5 to 9 minutes)
	$(PY) -m pytest tests/karpenter

test-kueue: .venv/.synced ## the real Kueue that you have: KUEUE=/path/of/checkout PROGRAM=/path/of/kueue (root not needed)
	SPOTTRAIN_KUEUE=$(KUEUE) SPOTTRAIN_KUEUE_PROGRAM=$(PROGRAM) $(PY) -m pytest -n 0 tests/kueue

test-prometheus: .venv/.synced ## a real Prometheus scrapes a real run with a reclaim (builds it once, 5 to 10 minutes)
	$(PY) -m pytest tests/prometheus

wheel: .venv/.synced ## dist/spottrain-VERSION-py3-none-any.whl: the runtime for an image of your own; needs no network
	rm -f dist/spottrain-*.whl
	$(PY) -m hatchling build --target wheel --directory dist

test-torch: wheel ## the wheel beside another torch, in an environment of its own: TORCH=2.6.0 PYTHON=3.11 or a path (5 to 7 GB)
	$(UV) venv --quiet --allow-existing --python $(TORCH_PYTHON) $(TORCH_ENV)
	$(UV) pip install --quiet --python $(TORCH_ENV) torch==$(TORCH)
	$(UV) pip install --quiet --python $(TORCH_ENV) --reinstall-package spottrain "spottrain[s3] @ file://$(WHEEL)"
	SPOTTRAIN_TORCH=$(TORCH_ENV)/bin/python $(PY) -m pytest -n 0 tests/torch_versions

test-frameworks: .venv/.synced ## an example beside its library, in an environment of its own: FRAMEWORK=keras (1.4 GB), jax (0.6), trl (5.5)
	UV_PROJECT_ENVIRONMENT=$(FRAMEWORK_ENV) $(UV) sync --frozen --quiet --project tests/frameworks/$(FRAMEWORK)
	SPOTTRAIN_FRAMEWORK=$(FRAMEWORK) SPOTTRAIN_FRAMEWORK_PYTHON=$(FRAMEWORK_ENV)/bin/python $(PY) -m pytest -n 0 tests/frameworks

test-matrix: .venv/.synced ## exactness after a kill: precision x accumulation x compile x workers x ranks, all 72
	$(PY) -m tests.chaos.matrix

chaos-runtime: .venv/.synced ## N=100 random kills of trainings, judged by what the store holds (SEED=1)
	$(PY) bench/chaos_runtime.py --runs $(or $(N),100) --seed $(or $(SEED),1) --lanes 2

chaos-operator: .venv/.synced ## N=50 jobs under random adversity to the real operator on a real API server (SEED=1)
	$(PY) bench/chaos_operator.py --runs $(or $(N),50) --seed $(or $(SEED),1)

chaos-examples: .venv/.synced ## each example killed at POINTS=20 random moments, half SIGTERM, half SIGKILL (KINDS="gan ddp", SEED=1)
	$(PY) bench/chaos_examples.py --points $(or $(POINTS),20) --seed $(or $(SEED),1) $(if $(KINDS),--kinds $(KINDS))

demo: .venv/.synced ## the main job: a spot node is reclaimed mid-training on a local real cluster (CLUSTER=existing: on yours)
	@PYTHONPATH=dev $(PY) -m demo

demo-local: .venv/.synced ## the same without a cluster or root: SIGTERM, resume, equal digests, in a folder
	@$(PY) dev/demo_local.py

cluster-up: .venv/.synced ## start the local cluster: real API server, two spot nodes, S3; load our images
	@$(PY) dev/cluster.py up

cluster-status: ## what runs, where its logs are, disk used
	@$(PY) dev/cluster.py status

cluster-down: ## end the local cluster; keeps binaries and images
	@$(PY) dev/cluster.py down

binaries: .venv/.synced ## build the pinned Kubernetes, etcd, Helm and S3 server binaries
	@$(PY) dev/cluster.py binaries

sync: ## copy crds/ into the chart
	cp crds/trainingjobs.yaml charts/spottrain/files/trainingjobs.yaml

golden: .venv/.synced ## render the chart again into tests/contract/golden; read the diff
	SPOTTRAIN_RENEW_GOLDEN=1 $(PY) -m pytest -q -n 0 tests/contract/test_chart_golden.py

bench-checkpoint: .venv/.synced bench/.peers ## what a save costs: stall, upload, seconds to durable, beside others
	$(RECORD) checkpoint -- $(PY) bench/checkpoint.py

bench/.peers: bench/peers.txt | .venv/.synced
	$(UV) pip install --quiet --no-deps --target $@ --requirement bench/peers.txt
	@touch $@

bench-sync: .venv/.synced ## spottrain sync beside a bare boto3 client: seconds to durable, bytes of unchanged files, memory
	$(RECORD) sync -- $(PY) bench/sync.py

bench-restart: .venv/.synced ## what a restart costs, cold and with the compile cache: 5 interleaved pairs
	$(RECORD) restart -- $(PY) bench/restart.py

bench-loop: .venv/.synced ## overhead of our training loop over a bare hand-written one: 10 interleaved pairs
	$(RECORD) loop -- $(PY) bench/loop.py

bench-techniques: .venv/.synced ## time and memory of each technique of the training loop, on a CPU
	$(RECORD) techniques -- $(PY) bench/techniques.py

bench-data: .venv/.synced ## what loader workers bring where reading a sample takes 40 ms
	$(RECORD) data_wait -- $(PY) bench/techniques.py --data --rounds 3 --steps 40

bench-gpu: .venv/.synced ## every technique on a GPU, and the 124M GPT beside a hand-written loop
	$(RECORD) gpu -- $(PY) -m bench.gpu

bench-diagnosis: .venv/.synced ## how often the verdict on what is slow is right, and what it costs
	$(RECORD) diagnosis -- $(PY) bench/diagnosis.py --seeds 5

bench-notice: .venv/.synced ## notice -> the runtime knows -> durable -> next attempt, N=100 times on real nodes
	$(RECORD) notice -- $(PY) bench/notice.py --rounds $(or $(N),100)

bench-failover: .venv/.synced ## the leader of two operators is killed, asked to end and stopped, ROUNDS=5 times each
	$(RECORD) failover -- $(PY) bench/failover.py --rounds $(or $(ROUNDS),5)

bench-scale: .venv/.synced ## 125 jobs x 8 pods beside Kubernetes' Job controller, 5 rounds in turn, on fake nodes
	$(RECORD) scale -- $(PY) -m bench.scale.burst --rounds $(or $(ROUNDS),5)

bench-scale-singles: .venv/.synced ## the same with 1,000 jobs of one worker, 3 rounds
	$(RECORD) scale_singles -- $(PY) -m bench.scale.burst --jobs 1000 --workers 1 --rounds $(or $(ROUNDS),3)

bench-scale-gang: .venv/.synced ## the same with one gang of 1,024, 3 rounds
	$(RECORD) scale_gang -- $(PY) -m bench.scale.burst --jobs 1 --workers 1024 --rounds $(or $(ROUNDS),3)

bench-storm: .venv/.synced ## notices for 30 % of the nodes of 1,000 running jobs within a minute, on fake nodes
	$(RECORD) storm -- $(PY) -m bench.scale.storm

bench-capacity: .venv/.synced ## 5,000 jobs, 10,000 pods: memory, restart, failover, waits of reconciles (an hour)
	$(RECORD) capacity -- $(PY) -m bench.scale.capacity

bench-soak: .venv/.synced ## a day of churn in MINUTES=15, operators that go included: memory, ghosts, stuck jobs
	$(RECORD) soak -- $(PY) -m bench.scale.soak --minutes $(or $(MINUTES),15)

bench-informer: .venv/.synced ## what an event of a pod costs in processor time: kopf's handler beside our informer
	$(RECORD) informer -- $(PY) bench/informer.py

bench-policy: .venv/.synced ## cost of choosing between spot and on-demand, on recorded traces: TRACES=FOLDER
	@test -n "$(TRACES)" || { echo "name the folder of the spot traces: make $@ TRACES=FOLDER"; exit 2; }
	SPOTTRAIN_TRACES="$(TRACES)" $(RECORD) policy -- $(PY) -m bench.policy

bench-goodput: .venv/.synced ## saved work per paid time, on recorded spot runs: TRACES=FOLDER
	@test -n "$(TRACES)" || { echo "name the folder of the spot traces: make $@ TRACES=FOLDER"; exit 2; }
	SPOTTRAIN_TRACES="$(TRACES)" $(RECORD) goodput -- $(PY) -m bench.goodput

bench-head: .venv/.synced ## 1000 races for HEAD on the real S3 server behind a fault proxy
	$(RECORD) head_race -- $(PY) bench/head_race.py --rounds 1000

clean: ## remove what this checkout made (not the cluster's binaries)
	rm -rf .venv .tools .torch .frameworks dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
