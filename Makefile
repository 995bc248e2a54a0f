# What a newcomer types. Each target installs what it is missing and says what it does; the work is in scripts/.
.DEFAULT_GOAL := help
CASES ?= 2000
SEED ?= 1
FILTER ?= .
TABLES ?=

.PHONY: help build demo test test-gpu check-gpu-stamp bench bench-gpu check lint format asan tsan clean

help:
	@echo 'qkv: attention engine for LLM serving. What you can say:'
	@echo
	@echo '  make demo                        watch it work: a small language model answers on this machine'
	@echo '  make build                       the library and the command: build/release/qkv'
	@echo '  make test                        everything that CI runs; about 40 minutes on 2 cores'
	@echo '  make test-gpu                    the tests that need a GPU; some 85 minutes of processor time, JOBS=16 at once'
	@echo '  make check-gpu-stamp             are the GPU sources those that were tested on a GPU?'
	@echo '  make check CASES=20000 SEED=1    random cases against the float64 definition'
	@echo '  make bench [FILTER=regex]        measure on this machine'
	@echo '  make bench-gpu [TABLES=decode]   measure on the GPU beside PyTorch and other peers; needs torch in .venv'
	@echo '  make lint | format               what clang-format, clang-tidy and ruff say | let them format'
	@echo '  make asan | tsan                 the C++ tests under sanitizers'
	@echo '  make clean                       remove build/ (.venv stays)'
	@echo
	@echo 'Missing Debian packages are installed when you are root, else named. HACKING.md tells the rest.'

build:
	@scripts/setup.sh build
	@bash -c 'source scripts/steps.sh && configure release && build release qkv_tool'

demo:
	@scripts/setup.sh build python demo
	@scripts/package.sh
	@.venv/bin/python examples/generate.py --verify

test:
	@scripts/setup.sh build mpi bench lint python demo cuda
	@scripts/test.sh all

bench:
	@scripts/setup.sh build bench python plot
	@scripts/package.sh
	@scripts/bench.sh '$(FILTER)'

bench-gpu:
	@scripts/setup.sh build python plot
	@scripts/package.sh
	@scripts/bench-gpu.sh $(TABLES)

test-gpu:
	@scripts/setup.sh build
	@scripts/test-gpu.sh

check-gpu-stamp:
	@python3 scripts/gpu_stamp.py check

check: build
	@build/release/qkv check --cases $(CASES) --seed $(SEED)

lint:
	@scripts/setup.sh build lint
	@scripts/lint.sh

format:
	@scripts/setup.sh lint
	@scripts/lint.sh --fix

asan tsan:
	@scripts/setup.sh build
	@scripts/test.sh $@

clean:
	rm -rf build
