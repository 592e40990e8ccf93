# Two commands: `make run` and `make test`. Both set up .venv on first use (tools/setup_environment.py).
#
#   make run                        compile and check (and, with an NVIDIA GPU, time) a tour of six blocks
#   make test                       the test suite, without tests marked `full`
#   make test-full                  all tests that need no GPU: also mutations of kernels, many random examples, every case
#   make run SETUP=0 PYTHON=python3 install nothing, use that interpreter's own packages
#   make run ARGS="softmax -i triton"
#   make test-gpu                   the tests that need an NVIDIA GPU
#   make sanitize                   every hand-written kernel under compute-sanitizer, on an NVIDIA GPU
#   make lint                       ruff and mypy
#   make prose                      print sentences that break a rule of prose (tools/prose.py)
#   make docs                       the docs site, in build/site (mkdocs.yml)
#   make wheel                      dist/: the source distribution and the wheel of a release, checked by twine

PYTHON ?= python3
SETUP ?= 1
ARGS ?=
VENV ?= .venv

GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
KIND := $(if $(GPU),cuda,cpu)
STAMP := $(VENV)/.installed-$(KIND)

ifeq ($(SETUP),0)
RUNNER := $(PYTHON)
READY :=
DOCS_READY :=
else
RUNNER := $(VENV)/bin/python
READY := $(STAMP)
DOCS_READY := $(VENV)/.installed-docs
endif

# Tests run in parallel by file, because tests of a file share workers and compiles; tests/conftest.py orders the files.
# Without pytest-xdist they run one after the other. GPU tests are split within files, as one file has most of them: 7
# processes on 8 cores, because compilers have threads of their own.
# Three processes on two cores, because tests wait for processes of their own.
PROCESSES = $(shell $(RUNNER) -c "import os; print(min(4, len(os.sched_getaffinity(0)) * 3 // 2))")
PARALLEL_BY_FILE = $(if $(shell $(RUNNER) -c "import xdist" 2>/dev/null && echo yes),-n $(PROCESSES) --dist loadfile --no-loadscope-reorder)
PARALLEL_BY_TEST = $(shell $(RUNNER) -c "import xdist, os; \
	print('--dist worksteal -n', max(1, min(14, len(os.sched_getaffinity(0)) * 7 // 8)))" 2>/dev/null)

# The name of the suite in a JUnit file (ARGS="--junitxml FILE"), from which tools/gpu_tests.py writes reports/gpu-tests.md.
GPU_NAME = $(shell nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
COMMIT ?= $(shell git rev-parse --short HEAD)

.PHONY: run test test-full test-gpu sanitize lint prose docs wheel setup clean

run: $(READY)
	$(RUNNER) -m xlafuse run $(ARGS)

test: $(READY)
	$(RUNNER) -m pytest -q -m "not gpu and not full" $(PARALLEL_BY_FILE) $(ARGS)

test-full: $(READY) $(DOCS_READY)
	$(RUNNER) -m pytest -q -m "not gpu" --hypothesis-profile full $(PARALLEL_BY_FILE) $(ARGS)

test-gpu: $(READY)
	$(RUNNER) -m pytest -q -m gpu $(PARALLEL_BY_TEST) -o junit_suite_name="$(GPU_NAME), commit $(COMMIT)" $(ARGS)

sanitize: $(READY)
	$(RUNNER) -m tools.sanitizer.run $(ARGS)

lint: $(READY)
	$(RUNNER) -m ruff check .
	$(RUNNER) -m mypy

prose: $(READY)
	$(RUNNER) -m tools.prose

docs: $(READY) $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(RUNNER) -m mkdocs build --strict

wheel: $(READY)
	rm -rf dist
	$(RUNNER) -m build --no-isolation
	$(RUNNER) -m twine check --strict dist/*

setup: $(READY)

$(STAMP): pyproject.toml constraints/$(KIND).txt tools/setup_environment.py
	@$(PYTHON) tools/setup_environment.py $(VENV) $(KIND)
	@touch $@

$(VENV)/.installed-docs: $(STAMP)
	$(RUNNER) -m pip install -q --disable-pip-version-check -c constraints/$(KIND).txt -e ".[docs]"
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-xla
