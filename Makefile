# SPDX-License-Identifier: Apache-2.0
# Every target sets up and builds what it needs. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
JOBS ?= $(shell scripts/cores.sh)
CUDA ?= AUTO
CUDA_TOOLKIT ?= auto

# The torch chosen last stays chosen, until TORCH= names another.
INSTALLED_TORCH := $(patsubst $(VENV)/.setup-torch-%,%,$(firstword $(wildcard $(VENV)/.setup-torch-*)))
CHOSEN_TORCH := $(TORCH)
TORCH ?= $(INSTALLED_TORCH)
override TORCH := $(if $(filter 2.11 2.12 2.13 2.14 2.15,$(TORCH)),$(TORCH).0,$(TORCH))
# With PYTHON= too, which may ask for another interpreter, the set-up is looked at again.
SETUP_STAMP := $(VENV)/.setup-torch-$(or $(TORCH),none)

PY := $(VENV)/bin/python
export PATH := $(abspath $(VENV)/bin):$(PATH)
export JOBS
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

.PHONY: help setup build package short-build test test-quick test-rest test-all test-gpu gpu-light test-engines test-asan test-tsan test-faults fuzz soak lint format demo bench bench-gpu convergence
.PHONY: docs wheel wheels release clean distclean FORCE

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22
	@echo '  Variables: TORCH=2.11.0 (2.11 to 2.15), PYTHON=python3.12, JOBS=2, CUDA=AUTO|ON|OFF, CUDA_TOOLKIT=auto|machine|wheels|DIR'

$(SETUP_STAMP): pyproject.toml scripts/constraints.txt scripts/setup.sh $(if $(PYTHON),FORCE)
	@PYTHON='$(PYTHON)' scripts/setup.sh $(VENV) $(TORCH)

setup: $(SETUP_STAMP)  ## make .venv, install everything, build
	@$(MAKE) --no-print-directory build

# Ninja knows what is stale, so the build itself is always asked; it takes a second when there is nothing to do.
build: $(SETUP_STAMP)  ## build what changed
	@scripts/build.sh $(VENV) $(CUDA) $(CUDA_TOOLKIT)

# What the Python package consists of: two thirds of the time of a whole build.
package: $(SETUP_STAMP)
	@scripts/build.sh $(VENV) $(CUDA) $(CUDA_TOOLKIT) bagua _C emulated_network

# With what `make test` runs: not the executables of tests that are labelled `long`.
short-build: $(SETUP_STAMP)
	@scripts/build.sh $(VENV) $(CUDA) $(CUDA_TOOLKIT) bagua _C emulated_network short_unit_tests

# Set-up and build are timed, for the summary at the end; each is a make of its own, as the first changes what the
# second finds.
define set_up_and_build
	@mkdir -p build && rm -f $(STEPS)
	@begin=$$SECONDS; $(MAKE) $(SETUP_STAMP); echo "$$((SECONDS - begin)) set-up" >>$(STEPS)
	@begin=$$SECONDS; $(MAKE) $(1); echo "$$((SECONDS - begin)) build" >>$(STEPS)
endef
STEPS := build/steps.txt

test:  ## C++ units, Python tests, PyTorch's own suite: every promise once
	$(call set_up_and_build,package)
	@BAGUA_STEPS=$(STEPS) scripts/test.sh $(VENV) short

test-quick:  ## of `make test` the fast units, a file of two ranks and one of each kind (90 seconds after a build)
	$(call set_up_and_build,short-build)
	@BAGUA_STEPS=$(STEPS) scripts/test.sh $(VENV) quick

test-rest:  ## what `make test` leaves out: the tests marked `long`
	$(call set_up_and_build,package)
	@BAGUA_STEPS=$(STEPS) scripts/test.sh $(VENV) rest

test-all:  ## all tests, those marked `long` too
	$(call set_up_and_build,package)
	@BAGUA_STEPS=$(STEPS) scripts/test.sh $(VENV) all

test-gpu: build  ## every GPU test, or those of FOLDERS=tests/gpu; runs nothing and fails without a GPU
	@scripts/test_gpu.sh $(VENV) $(FOLDERS)

test-asan: $(SETUP_STAMP)  ## C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@scripts/sanitize.sh $(VENV) asan

test-tsan: $(SETUP_STAMP)  ## C++ tests under ThreadSanitizer
	@scripts/sanitize.sh $(VENV) tsan

fuzz: $(SETUP_STAMP)  ## fuzz what a peer sends, FUZZ_SECONDS=60 for each of FUZZ_TARGETS (all; clang 16 or later)
	@scripts/fuzz.sh $(VENV) $(or $(FUZZ_SECONDS),60) $(FUZZ_TARGETS)

# TORCH and PYTHON are those of the other machine: the set-up here stays as it is, and only lends uv.
gpu-light: $(if $(wildcard $(VENV)/bin/uv),,setup)  ## pack for a GPU that is there for minutes into .gpu, and try it on CPU tensors (TORCH=2.11.0, PYTHON=3.12, BAGUA_CUDA_ARCHS=90)
	@TORCH='$(CHOSEN_TORCH)' PYTHON='$(PYTHON)' scripts/gpu_light.sh $(VENV)

test-engines: package  ## train with each engine; installs tests/engines/packages.txt, torchtitan, and as root Slurm
	@scripts/engines.sh $(VENV)

soak: package  ## SOAK_OPERATIONS=200000 random operations on 2 to 8 ranks, each checked
	@OMP_NUM_THREADS=1 $(PY) tests/soak/soak.py --operations $(or $(SOAK_OPERATIONS),200000) $(SOAK_ARGS)

test-faults: package  ## kill, stop, hang and raise at random moments for BAGUA_FAULT_MINUTES (60)
	@OMP_NUM_THREADS=1 BAGUA_FAULT_MINUTES=$${BAGUA_FAULT_MINUTES:-60} $(PY) -m pytest tests/faults -o timeout=0

lint: $(SETUP_STAMP)  ## sizes and licences, clang-format, clang-tidy, ruff, mypy
	@scripts/lint.sh $(VENV)

format: $(SETUP_STAMP)  ## rewrite the sources as clang-format and ruff want them
	@scripts/lint.sh $(VENV) --format

demo: package  ## train on Fashion-MNIST with 2 ranks: 8-bit gradients beside full precision
	@$(PY) examples/demo.py $(DEMO_ARGS)

bench: build  ## measure codec, optimizers, calls inside a host, and training between emulated hosts
	@scripts/bench.sh $(VENV) $(BENCH_ARGS)

bench-gpu: $(SETUP_STAMP)  ## measure what needs a GPU, on those that there are; measures nothing and fails without one
	@scripts/build.sh $(VENV) $(CUDA) $(CUDA_TOOLKIT) bagua _C emulated_network codec_operators
	@OMP_NUM_THREADS=1 $(PY) benchmarks/gpu/bench_gpu.py $(BENCH_ARGS)

convergence: package  ## train what has no record yet, rewrite benchmarks/convergence/RESULTS.md (all of it: 9 hours on two cores)
	@PYTHONPATH=examples OMP_NUM_THREADS=1 $(PY) benchmarks/convergence/run.py $(CONVERGENCE_ARGS)

docs: package  ## the documentation site, build/site/index.html
	@$(PY) docs/site/build.py build/site
	@echo build/site/index.html

wheel: $(SETUP_STAMP)  ## build/dist/bagua-*.whl for the torch of the set-up
	@$(PY) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/dist .
	@ls build/dist

wheels: $(SETUP_STAMP)  ## build/dist: a wheel for each of TORCHES="2.11 ... 2.15" and PYTHONS="3.10 ... 3.13" (10 minutes of a core for a torch, 2 for each more Python)
	@scripts/wheels.sh $(VENV)

release: $(SETUP_STAMP)  ## build/release: sdist, wheels from it (as `make wheels`), SHA256SUMS, NOTES.md, all checked; uploads nothing
	@scripts/release.sh $(VENV)

clean:  ## remove what was built
	rm -rf build compile_commands.json

distclean: clean  ## remove the virtual environment too
	rm -rf $(VENV)
