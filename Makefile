# `make demo` and `make test` are all that a fresh machine with Python >= 3.11 needs: each builds its own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH := build/bench-venv

.DEFAULT_GOAL := help
.PHONY: help dist test-wheels demo test test-torch coverage test-slow test-anywhere test-real test-hf affected test-faults test-collectives test-gpu lint verified scripts mutants ablation house bench-overhead bench-launch bench-memory bench-zero bench-checkpoint bench-restart bench-faults bench-servers-needed bench-convergence bench-collectives bench-trace bench-sequence bench-pipeline bench-slow-links bench-ordered-mean bench-gpu clean bench-plan site

help:  ## List the targets.
	@echo "Usage: make TARGET [PYTHON=python3.12]; each target makes the virtual environment that it needs."
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  %-22s%s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.demo  ## Train a real model on two processes, in about a minute; the same command again resumes.
	$(BIN)/shoal train digits -n 2 --out runs/digits

# Test processes share the cores with the ranks that they start. A run that takes longer than GOAL_S says
# so, and one that takes LIMIT_S is ended.
GOAL_S ?= 0
LIMIT_S ?= 0
EVERYDAY := -n auto --maxprocesses 8 --dist worksteal -m "not slow and not gpu"

test: $(VENV)/.test  ## Run the everyday tests and `make lint` beside them: what continuous integration runs.
	$(BIN)/python -m tests.harness.run --beside "$(MAKE) -s lint" --goal-s $(GOAL_S) --limit-s $(LIMIT_S) $(EVERYDAY)

# The oldest supported version: make test-torch TORCH=2.11.0. pip brings torchvision and torchao that suit it.
TORCH ?= 2.15.0
WITH_TORCH := build/torch-$(TORCH)

test-torch: $(WITH_TORCH)/.test  ## Run the everyday tests with another torch, TORCH (default: 2.15.0).
	$(WITH_TORCH)/bin/python -m tests.harness.run $(EVERYDAY)

# Some of them: make test-slow TESTS=tests/train
TESTS ?= tests

test-slow: $(VENV)/.test  ## Run the tests that take minutes, in TESTS (default: all).
	$(BIN)/python -m tests.harness.run -m slow $(TESTS)

COVERAGE := build/coverage

coverage: $(VENV)/.test  ## Tell which lines and branches of shoal/ the everyday tests take: four times as long as `make test`.
	$(BIN)/pip install -q "coverage>=7.17"
	rm -rf $(COVERAGE) && mkdir -p $(COVERAGE)
	-COVERAGE_DIR=$(CURDIR)/$(COVERAGE) COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml $(BIN)/python -m tests.harness.run $(EVERYDAY)
	COVERAGE_DIR=$(COVERAGE) $(BIN)/coverage combine -q
	COVERAGE_DIR=$(COVERAGE) $(BIN)/coverage json -q -o $(COVERAGE)/report.json
	$(BIN)/python -m tests.harness.coverage_report $(COVERAGE)/report.json

# Some of them: make test-anywhere SETTINGS="sums one-core"
test-anywhere: $(VENV)/.test  ## Run the everyday tests as on other machines, and write the table, in minutes.
	$(BIN)/python -m tests.harness.anywhere $(SETTINGS)

test-real: $(VENV)/.test  ## Run the tests on real ssh servers, Slurm and Open MPI. As root.
	.ci/run-real

test-hf: $(VENV)/.test  ## Run the tests with transformers, peft, accelerate and Lightning. Installs them.
	$(BIN)/pip install -q -e ".[test,hf,lightning]" -c constraints.txt
	$(BIN)/python -m pytest tests/integrations tests/examples/test_hugging_face_example.py

affected: $(VENV)/.test  ## Name the slow suites that guard what differs from main.
	@$(BIN)/python -m tests.harness.affected

# Each fault of the parameter servers 300 times: hours. Fewer: make test-faults TRIALS=20
TRIALS ?= 300
FAULTS := tests/strategies/server/test_server_faults.py tests/strategies/server/test_server_network.py \
  tests/strategies/server/test_server_workers.py tests/strategies/server/test_server_hostile_clients.py tests/strategies/server/test_server_elastic.py

test-faults: $(VENV)/.test  ## Kill, stop and cut off parameter servers and workers, TRIALS times each (default: 300).
	SHOAL_FAULT_TRIALS=$(TRIALS) $(BIN)/python -m pytest -n auto --maxprocesses 8 $(FAULTS)

# A rank that dies or stops in the middle of a collective, 300 times, and of a compiled all-reduce, 60 times.
test-collectives: $(VENV)/.test  ## Kill or stop a rank in the middle of a collective, 300 times.
	$(BIN)/python -m pytest tests/shm_backend/test_backend_faults.py tests/shm_backend/test_native.py

test-gpu: $(VENV)/.test  ## Run the tests that need CUDA devices.
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.test  ## Check style, types and the directions of imports.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Shoal needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 demo"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt install python3-venv"; exit 1; }

# The part of Shoal that is compiled, where there is a compiler: a change there asks for a new installation.
COMPILED := shoal/shm_backend/native.c

$(VENV)/.demo: pyproject.toml setup.py constraints.txt $(COMPILED) | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[plots,tensorboard]"
	@touch $@

$(VENV)/.test: pyproject.toml setup.py constraints.txt $(COMPILED) | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test]"
	@touch $@ $(VENV)/.demo

$(WITH_TORCH)/.test: pyproject.toml setup.py constraints.txt $(COMPILED)
	$(PYTHON) -m venv $(WITH_TORCH)
	grep -vE '^(torch|torchvision|torchao)==' constraints.txt > $(WITH_TORCH)/constraints.txt
	$(WITH_TORCH)/bin/python -m pip install -q -c $(WITH_TORCH)/constraints.txt torch==$(TORCH) -e ".[test]"
	@touch $@

$(BENCH)/.done: benchmarks/requirements.txt constraints.txt | $(BIN)/python
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install -q -c constraints.txt -e ".[train,plots,tensorboard]" -r benchmarks/requirements.txt
	@touch $@

verified: $(VENV)/.demo  ## Write docs/verified.md anew: every strategy against one device, on every model.
	$(BIN)/python -m tests.matrix.report docs/verified.md

# Without transformers its rows stay as they are: $(BIN)/python -m pip install transformers
scripts: $(VENV)/.test  ## Write docs/scripts.md anew: every kind of script under every strategy.
	$(BIN)/python -m tests.scripts.report docs/scripts.md

mutants: $(VENV)/.test  ## Plant bugs in loops, and write what the proof finds into docs/proof.md: a minute or two on two idle cores.
	$(BIN)/python -m tests.mutants.report docs/mutants.json

# Some of them: make ablation CHECKS="'kept numbers'"
CHECKS ?=

ablation: $(VENV)/.test  ## Switch each check off in turn, run all scripts, and write docs/checks.md: half an hour.
	$(BIN)/python -m tests.ablation.report docs/checks.md $(CHECKS)

house: $(VENV)/.test  ## Count the source anew, and write the numbers into docs/design.md.
	$(BIN)/python -m tests.conventions.source_numbers

bench-overhead: $(BENCH)/.done  ## Measure what Shoal adds to a step of hand-written DDP, Accelerate, Fabric and Lightning.
	OMP_NUM_THREADS=1 $(BENCH)/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.overhead.measure
	for backend in Gloo shoal; do OMP_NUM_THREADS=1 $(BENCH)/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.overhead.backends $$backend; done
	$(BENCH)/bin/python -m benchmarks.overhead.checks
	$(BENCH)/bin/python -m benchmarks.overhead.report

bench-launch: $(BENCH)/.done  ## Measure the time until training starts, against torchrun, accelerate launch and mpirun.
	$(BENCH)/bin/python -m benchmarks.launch.measure
	$(BENCH)/bin/python -m benchmarks.launch.report

bench-memory: $(BENCH)/.done  ## Measure what each rank holds, tensor by tensor.
	$(BENCH)/bin/python -m benchmarks.memory.measure
	$(BENCH)/bin/python -m benchmarks.memory.report
	$(BENCH)/bin/python -m benchmarks.memory.prepare_peaks

bench-plan: $(BENCH)/.done  ## Measure what shoal plan has predicted: time and memory of steps.
	$(BENCH)/bin/python -m benchmarks.plan.measure
	$(BENCH)/bin/python -m benchmarks.plan.report
	$(BENCH)/bin/python -m benchmarks.plan.hosts measure
	$(BENCH)/bin/python -m benchmarks.plan.hosts page

bench-zero: $(BENCH)/.done  ## Measure sharded steps against a hand-written fully_shard.
	OMP_NUM_THREADS=1 $(BENCH)/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.zero.measure
	$(BENCH)/bin/python -m benchmarks.zero.report

bench-sequence: $(BENCH)/.done  ## Measure the memory of activations under sequence parallelism.
	OMP_NUM_THREADS=1 $(BENCH)/bin/python -m benchmarks.sequence.measure
	$(BENCH)/bin/python -m benchmarks.sequence.report

bench-pipeline: $(BENCH)/.done  ## Measure how long the ranks of a pipeline are idle.
	OMP_NUM_THREADS=1 $(BENCH)/bin/python -m benchmarks.pipeline.measure
	$(BENCH)/bin/python -m benchmarks.pipeline.report

bench-checkpoint: $(BENCH)/.done  ## Measure how long a save stops training.
	$(BENCH)/bin/python -m benchmarks.checkpoint.measure
	$(BENCH)/bin/python -m benchmarks.checkpoint.report

FAULT_TRIALS ?= 20

bench-faults: $(BENCH)/.done  ## Let runs meet faults, FAULT_TRIALS times each (default: 20).
	$(BENCH)/bin/python -m benchmarks.faults.measure --trials $(FAULT_TRIALS)
	$(BENCH)/bin/python -m benchmarks.faults.writer_cost
	$(BENCH)/bin/python -m benchmarks.faults.report

bench-restart: $(BENCH)/.done  ## Measure how soon a run goes on after a SIGKILL.
	$(BENCH)/bin/python -m benchmarks.restart.measure
	$(BENCH)/bin/python -m benchmarks.restart.report

bench-collectives: $(BENCH)/.done  ## Measure all-reduces on one machine against other libraries.
	OMP_NUM_THREADS=1 $(BENCH)/bin/python -m benchmarks.collectives.measure
	OMP_NUM_THREADS=1 $(BENCH)/bin/python -m benchmarks.collectives.call_parts
	$(BENCH)/bin/python -m benchmarks.collectives.report

bench-trace: $(BENCH)/.done  ## Measure what a trace costs.
	OMP_NUM_THREADS=1 $(BENCH)/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.trace.measure
	$(BENCH)/bin/python -m benchmarks.trace.report

bench-convergence: $(BENCH)/.done  ## Compare the accuracy of stale parameter servers with that of ddp.
	$(BENCH)/bin/python -m benchmarks.convergence.measure
	$(BENCH)/bin/python -m benchmarks.convergence.report

# As root: it makes network namespaces, and removes them.
bench-servers-needed: $(BENCH)/.done  ## Find how many parameter servers a step needs. As root.
	OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR $(BENCH)/bin/python -m benchmarks.servers-needed.measure
	$(BENCH)/bin/python -m benchmarks.servers-needed.report

# As root.
bench-slow-links: $(BENCH)/.done  ## Measure what compression is worth on slow links. As root.
	OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR $(BENCH)/bin/python -m benchmarks.slow-links.measure
	$(BENCH)/bin/python -m benchmarks.slow-links.report

# As root.
bench-ordered-mean: $(BENCH)/.done  ## Compare means in the order of ranks with a ring. As root.
	OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR $(BENCH)/bin/python -m benchmarks.ordered-mean.measure
	$(BENCH)/bin/python -m benchmarks.ordered-mean.report

# On a machine with a GPU. Without torch.compile: make bench-gpu GPU_FLAGS=--no-compile
bench-gpu: $(VENV)/.test  ## Measure steps on one GPU against hand-written loops.
	$(BIN)/python -m benchmarks.gpu.measure $(GPU_FLAGS)
	$(BIN)/python -m benchmarks.gpu.report

# One wheel for every platform, and two with the compiled part for Linux on this machine's processor and Python 3.11
# and later: for every glibc that auditwheel finds new enough, and for musl, which zig brings. Where a compiler fails,
# setuptools leaves the compiled part out, so dist looks for it.
BUILD := $(BIN)/python -c "import sys; from setuptools import build_meta; [getattr(build_meta, 'build_' + kind)('dist') for kind in sys.argv[1:]]"

$(VENV)/.release: pyproject.toml | $(VENV)/.test
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[release]"
	@touch $@

dist: $(VENV)/.release  ## Build the source distribution and all wheels into dist/.
	rm -rf dist build/lib build/bdist.* build/wheel
	SHOAL_PURE=1 $(BUILD) sdist wheel
	rm -rf build/lib build/bdist.*
	$(subst 'dist','build/wheel',$(BUILD)) wheel
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl
	rm -rf build/lib build/bdist.* build/temp.*
	CC="$(CURDIR)/$(BIN)/python -m ziglang cc -target $$(uname -m)-linux-musl" $(BIN)/python -c "from setuptools import build_meta; \
		build_meta.build_wheel('dist', {'--build-option': '--plat-name=musllinux_1_2_$$(uname -m)'})"
	$(BIN)/python -m zipfile -l dist/*musllinux*.whl | grep _native.abi3.so

# Some Pythons: make test-wheels PYTHONS="python3.12 python3.13"
PYTHONS ?= $(PYTHON)

# torch has no wheel for musl (Alpine has a package), so pip on this machine cannot install that one.
test-wheels: dist  ## Install each wheel of dist/ into clean environments of PYTHONS (default: PYTHON), and train with it.
	for python in $(PYTHONS); do for wheel in dist/*none-any.whl dist/*manylinux*.whl; do PYTHON=$$python .ci/test-wheel $$wheel || exit 1; done; done

$(VENV)/.site: pyproject.toml | $(VENV)/.test
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[docs]"
	@touch $@

site: $(VENV)/.site  ## Build the site of the documents into build/site; a link that leads nowhere is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## Remove everything that these targets have built, the virtual environments included.
	rm -rf $(VENV) build dist *.egg-info
