# `make demo` and `make test` are all that a fresh machine with Python >= 3.11 needs: each builds its own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH := build/bench-venv



.PHONY: demo test test-slow test-faults test-collectives test-gpu lint verified bench-overhead bench-launch bench-memory bench-zero bench-checkpoint bench-restart bench-server bench-servers-needed bench-convergence bench-collectives bench-trace bench-tensor bench-sequence bench-pipeline bench-slow-links bench-scaling measure-allreduce clean

demo: $(VENV)/.demo
	$(BIN)/shoal train digits -n 2 --out runs/digits

test: $(VENV)/.test lint
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile -m "not slow and not gpu"

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow

# Each fault of the parameter servers 300 times: hours. Fewer: make test-faults TRIALS=20
TRIALS ?= 300
FAULTS := tests/strategies/test_server_faults.py tests/strategies/test_server_network.py \
  tests/strategies/test_server_workers.py tests/strategies/test_server_strangers.py tests/strategies/test_server_elastic.py

test-faults: $(VENV)/.test
	SHOAL_FAULT_TRIALS=$(TRIALS) $(BIN)/python -m pytest -n auto --maxprocesses 8 $(FAULTS)

# A rank that dies or stops in the middle of a collective, 300 times, and of a compiled all-reduce, 60 times.
test-collectives: $(VENV)/.test
	$(BIN)/python -m pytest tests/comm/test_backend_faults.py tests/comm/test_express.py

test-gpu: $(VENV)/.test
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.test
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
COMPILED := shoal/comm/backend/express.c

$(VENV)/.demo: pyproject.toml constraints.txt $(COMPILED) | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(COMPILED) | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test]"
	@touch $@ $(VENV)/.demo

$(BENCH)/.done: benchmarks/requirements.txt constraints.txt | $(BIN)/python
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install -q -c constraints.txt -e . -r benchmarks/requirements.txt
	@touch $@

verified: $(VENV)/.demo
	$(BIN)/python -m shoal.proof.matrix docs/verified.md

bench-overhead: $(BENCH)/.done
	OMP_NUM_THREADS=1 $(BENCH)/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.overhead.measure
	for backend in Gloo shoal; do OMP_NUM_THREADS=1 $(BENCH)/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.overhead.backends $$backend; done
	$(BENCH)/bin/python -m benchmarks.overhead.report

bench-launch: $(BENCH)/.done
	$(BENCH)/bin/python -m benchmarks.launch.measure
	$(BENCH)/bin/python -m benchmarks.launch.report

bench-memory: $(BENCH)/.done
	$(BENCH)/bin/python -m benchmarks.memory.measure
	$(BENCH)/bin/python -m benchmarks.memory.report

bench-zero: $(BENCH)/.done
	OMP_NUM_THREADS=1 $(BENCH)/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.zero.measure
	$(BENCH)/bin/python -m benchmarks.zero.report

bench-tensor: $(BENCH)/.done
	OMP_NUM_THREADS=1 $(BENCH)/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.tensor.measure
	$(BENCH)/bin/python -m benchmarks.tensor.report

bench-sequence: $(BENCH)/.done
	OMP_NUM_THREADS=1 $(BENCH)/bin/python -m benchmarks.sequence.measure
	$(BENCH)/bin/python -m benchmarks.sequence.report

bench-pipeline: $(BENCH)/.done
	OMP_NUM_THREADS=1 $(BENCH)/bin/python -m benchmarks.pipeline.measure
	$(BENCH)/bin/python -m benchmarks.pipeline.report

bench-checkpoint: $(BENCH)/.done
	$(BENCH)/bin/python -m benchmarks.checkpoint.measure
	$(BENCH)/bin/python -m benchmarks.checkpoint.report

bench-restart: $(BENCH)/.done
	$(BENCH)/bin/python -m benchmarks.restart.measure
	$(BENCH)/bin/python -m benchmarks.restart.report

bench-server: $(BENCH)/.done
	OMP_NUM_THREADS=1 $(BENCH)/bin/python -m benchmarks.server.measure
	$(BENCH)/bin/python -m benchmarks.server.report

bench-collectives: $(BENCH)/.done
	OMP_NUM_THREADS=1 $(BENCH)/bin/python -m benchmarks.collectives.measure
	$(BENCH)/bin/python -m benchmarks.collectives.report

bench-trace: $(BENCH)/.done
	OMP_NUM_THREADS=1 $(BENCH)/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.trace.measure
	$(BENCH)/bin/python -m benchmarks.trace.report

bench-convergence: $(BENCH)/.done
	$(BENCH)/bin/python -m benchmarks.convergence.measure
	$(BENCH)/bin/python -m benchmarks.convergence.report

# As root: it makes network namespaces, and removes them.
bench-servers-needed: $(BENCH)/.done
	OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR $(BENCH)/bin/python -m benchmarks.servers-needed.measure
	$(BENCH)/bin/python -m benchmarks.servers-needed.report

bench-scaling: $(BENCH)/.done
	OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR $(BENCH)/bin/python -m benchmarks.scaling.measure
	$(BENCH)/bin/python -m benchmarks.scaling.report

# The table of `--allreduce auto`, as root.
measure-allreduce: $(BENCH)/.done
	OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR $(BENCH)/bin/python -m benchmarks.scaling.table

# As root too.
bench-slow-links: $(BENCH)/.done
	OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR $(BENCH)/bin/python -m benchmarks.slow-links.measure
	$(BENCH)/bin/python -m benchmarks.slow-links.report

clean:
	rm -rf $(VENV) build *.egg-info
