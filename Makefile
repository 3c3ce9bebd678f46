# `make demo` and `make test` do everything from a fresh clone: own virtual environment, install,
# native build, then their job. With another environment that has everything already, nothing is
# installed: `make test VENV=/path/to/venv`.

VENV ?= .venv
PYTEST_ARGS ?=
WORKERS ?= 2
PIP_TRIES ?= 3

PYTHON := $(abspath $(VENV))/bin/python
export PATH := $(abspath $(VENV))/bin:$(PATH)
# One thread each: the workers of pytest share the cores.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

NATIVE := build/Release/.built
ifeq ($(VENV),.venv)
INTERPRETER := $(VENV)/.python
PACKAGE := $(VENV)/.package
TOOLS := $(VENV)/.tools
else
INTERPRETER :=
PACKAGE := $(NATIVE)
TOOLS := $(NATIVE)
export PYTHONPATH := $(CURDIR)/src
endif

# What runs without a GPU; benchmarks/gpu and benchmarks/prediction say how they are run on one.
BENCHMARKS := benchmarks/core/scale.py benchmarks/fastsa/speed.py benchmarks/fastsa/table1.py \
  benchmarks/rotor/run.py benchmarks/staged/figures.py benchmarks/hiremate/partition_speed.py \
  benchmarks/hiremate/against_optimum.py benchmarks/hiremate/capture.py \
  benchmarks/hiremate/structure.py benchmarks/hiremate/threads.py benchmarks/hiremate/table3.py \
  benchmarks/hiremate/table4.py benchmarks/hiremate/figures.py \
  benchmarks/overhead/keep_all.py benchmarks/planning/again.py benchmarks/planning/first.py \
  benchmarks/planning/guards.py benchmarks/planning/meta.py \
  benchmarks/auto/table.py benchmarks/transfers/table.py benchmarks/soak/soak.py

CXX_FILES := $(wildcard cpp/*.cpp cpp/*/*.cpp cpp/*/*.h benchmarks/fastsa/structure/*.cpp \
  benchmarks/fastsa/structure/*.h)

.PHONY: demo test matrix check docs reference dist format bench sanitize browser native clean

demo: $(PACKAGE) $(NATIVE)
	$(PYTHON) -m rekindle demo

test: $(TOOLS) $(NATIVE)
	$(PYTHON) -m pytest -n $(WORKERS) -rs -m "not slow and not gpu" $(PYTEST_ARGS)

# With the oldest torch that is supported, the newest and the pinned one; see tools/matrix.py.
matrix: $(TOOLS) $(NATIVE)
	$(PYTHON) tools/matrix.py --workers $(WORKERS) -- $(PYTEST_ARGS)

check: $(TOOLS) $(NATIVE)
	clang-format --dry-run -Werror $(CXX_FILES)
	ruff format --check .
	ruff check .
	mypy
	lint-imports --no-cache

# The site, in site/; any warning fails.
docs: $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict -q

# The pages that are made from docstrings, the parser and the benchmarks' results.
reference: $(PACKAGE) $(NATIVE)
	$(PYTHON) tools/reference.py

# The source archive and the wheels, each tried in an empty environment, in dist/.
dist: $(INTERPRETER)
	$(PYTHON) tools/dist.py

format: $(TOOLS)
	clang-format -i $(CXX_FILES)
	ruff format .
	ruff check --fix .

bench: $(TOOLS) $(NATIVE) sanitize
	$(PYTHON) -m pytest -m "slow and not gpu" $(PYTEST_ARGS)
	for script in $(BENCHMARKS); do echo "$$script"; $(PYTHON) $$script || exit 1; done

# The native module with the address and undefined-behaviour sanitizers, in a package of its own whose
# Python files are links, and the tests that use it most. A report ends the process, so make fails.
# libstdc++ is preloaded too: the sanitizer wants to find __cxa_throw when it starts. CPython and
# torch never free some of what they allocate, so leaks are not looked for.
SANITIZED := build/Sanitize/package
SANITIZED_TESTS ?= tests/unit/core tests/unit/solve tests/contract tests/property/test_anneal_moves.py
sanitize: $(TOOLS)
	cmake -S . -B build/Sanitize -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DREKINDLE_STRICT=ON \
	  -DREKINDLE_SANITIZE=ON -DPython_EXECUTABLE=$(PYTHON)
	cmake --build build/Sanitize
	find $(SANITIZED)/rekindle -type l -delete
	for path in $(CURDIR)/src/rekindle/[!_]* $(CURDIR)/src/rekindle/__*.py; do \
	  ln -s "$$path" $(SANITIZED)/rekindle/ || exit 1; \
	done
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
	  PYTHONPATH=$(CURDIR)/$(SANITIZED) \
	  $(PYTHON) -m pytest -m "not slow and not gpu" $(SANITIZED_TESTS) $(PYTEST_ARGS)

# For the tests of the report page: the browser that is there, else Debian's.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	  command -v $$name >/dev/null && exit 0; \
	done; \
	for try in $$(seq $(PIP_TRIES)); do \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null \
	    && exit 0; \
	  echo "installing chromium failed (try $$try of $(PIP_TRIES))" >&2; sleep $$try; \
	done; echo "no browser: put chromium or google-chrome on the PATH" >&2; exit 1

native: $(NATIVE)

clean:
	rm -rf .venv .venv-* build dist site src/rekindle/_native.*

# Downloads fail now and then; what was fetched stays in pip's cache, so trying again is cheap.
pip_install = for try in $$(seq $(PIP_TRIES)); do \
	$(PYTHON) -m pip install -q -c constraints.txt $(1) && exit 0; \
	echo "pip install failed (try $$try of $(PIP_TRIES))" >&2; sleep $$try; done; exit 1

$(VENV)/.python:
	@for python in python3 python3.11 python3.12 python3.13; do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	    && exec $$python -m venv $(VENV); \
	done; echo "Python 3.11 or newer is needed, and none was found on PATH" >&2; exit 1
	touch $@

# torch first and pinned: anything that pulls it on its own may pull the CUDA packages as well.
$(VENV)/.package: $(VENV)/.python pyproject.toml constraints.txt
	$(call pip_install,torch)
	$(call pip_install,scikit-build-core nanobind cmake ninja)
	$(call pip_install,--no-build-isolation -e . --config-settings=build-dir=build/Release \
	  --config-settings=cmake.define.REKINDLE_STRICT=ON)
	touch $@

$(VENV)/.tools: $(VENV)/.package requirements-test.txt requirements-test-nodeps.txt
	$(call pip_install,-r requirements-test.txt)
	$(call pip_install,--no-deps -r requirements-test-nodeps.txt)
	touch $@

$(NATIVE): CMakeLists.txt $(wildcard cpp/* cpp/*/*) $(filter-out $(NATIVE),$(PACKAGE))
	cmake -S . -B build/Release -G Ninja -DREKINDLE_STRICT=ON -DPython_EXECUTABLE=$(PYTHON)
	cmake --build build/Release
	touch $@
