# What a contributor types is what CI runs.
#
#   make demo       install, start tp 2 × dp 2 on the embedded model, ask two questions, stop
#   make test       the CPU suite, samples of the matrices (under 15 minutes on two cores)
#   make test-full  everything, the whole matrices of deaths too (hours on two cores)

VENV   := .venv
PYTHON := $(VENV)/bin/python
PYTEST := $(PYTHON) -m pytest
# torch first and alone, in the version whose CPU build suffices: asked for later, by another package,
# it may arrive with several gigabytes of CUDA. On a GPU machine: make install TORCH=torch
TORCH  ?= torch==2.13.0
MINUTES ?= 10
STAMP  := $(VENV)/.installed

.PHONY: install demo test test-full processes faults gpu lint types wheel clean repeat torture

install: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -c "import torch" 2>/dev/null || $(PYTHON) -m pip install --progress-bar on "$(TORCH)"
	$(PYTHON) -m pip install --progress-bar on -e ".[dev]"
	touch $(STAMP)

demo: install
	$(PYTHON) -m phalanx.launch.demo

test: install lint types
	$(PYTEST) -m "not full"

test-full: install lint types
	$(PYTEST)

processes faults gpu: install
	$(PYTEST) tests/$@

# make repeat T=tests/shm/test_ring_buffer.py: the same test 200 times, until it fails
repeat: install
	for i in $$(seq 200); do $(PYTEST) -q -x $(T) || exit 1; done

# make torture MINUTES=10: processes of a cluster killed at random under live streams
torture: install
	$(VENV)/bin/cluster-bench torture --minutes $(MINUTES) -- tests/fixtures/tiny-llama --tp 2 --dp 2 --device cpu

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: install
	$(VENV)/bin/mypy

wheel: install
	rm -rf build
	$(PYTHON) -m build --wheel --outdir dist

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
