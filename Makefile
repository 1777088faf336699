# Everything starts here. On a fresh machine with Python 3.11 or newer, pip and make:
#
#     make demo      set up, then train a small language model on four processes and kill one of them
#     make test      set up, then run the daily tests
#     make help      the rest
#
# PYTHON chooses the interpreter (make test PYTHON=python3.12 VENV=.venv312), PYTEST_ARGS what pytest gets besides,
# WORKERS how many processes share the tests (0: none but pytest itself, for a debugger). TORCH chooses another torch than
# requirements/constraints.txt, in an environment of its own (make test TORCH=2.14.1 VENV=.venv-torch2141).

PYTHON      ?= python3
VENV        ?= .venv
EXTRA       ?= test
PIP_ARGS    ?=
TORCH       ?=
PYTEST_ARGS ?=
WORKERS     ?= 2
TIER        ?= all
FUZZ_COUNT  ?= 10M
FUZZ_MODE   ?= ReleaseSafe
STRESS_RUNS ?= 3
SEEDS       ?= 200
SCHEDULES   ?= 10000
WORKLOAD    ?= mixed
FIRST_SEED  ?= 0
SECONDS     ?= 120
SAMPLE      ?= 0
FILES       ?= src/trimesh/shape/extent.py
PROGRAMS    ?= 2000
STEPS       ?= 30
MINUTES     ?= 30
KINDS       ?=
EVERY       ?= 2
FAST        ?= 1000

BIN     := $(VENV)/bin
PY      := $(BIN)/python
PINS    := $(if $(TORCH),$(VENV)/constraints-torch-$(TORCH).txt,requirements/constraints.txt)
PIP     := $(PY) -m pip --disable-pip-version-check install --quiet --no-compile --constraint $(PINS) $(PIP_ARGS)
STEP    := @$(PYTHON) requirements/step.py
PYTEST  := $(PY) -m pytest
ZIG     := $(PY) -m ziglang
LIBRARY := src/trimesh/_native/libtrimesh.so

# Zig's caches stay in the tree.
export ZIG_LOCAL_CACHE_DIR  ?= $(CURDIR)/.zig-cache
export ZIG_GLOBAL_CACHE_DIR ?= $(CURDIR)/.zig-cache/global

native_sources := $(shell find build.zig build.zig.zon native -type f 2>/dev/null)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all check lint format types mypy pyright layers zig-check races fuzz bench bench-smoke \
	stress soak soak-proc soak-alone tensor-fuzz trainings-fuzz tensor-training mutate mutations test-verbs test-cuda \
	cuda-bundle seeds fresh-seeds scenarios build-native wheel coverage setup setup-dev clean site tutorial release

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*##/\1##/p' $(MAKEFILE_LIST) | awk -F '## ' '{ printf "  make %-14s%s\n", $$1, $$2 }'

# ---- set-up ------------------------------------------------------------------------------------------------

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "trimesh needs Python 3.11 or newer; say which one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(STEP) "set-up: Python environment in $(VENV)" $(VENV) $(PYTHON) -m venv $(VENV)

$(VENV)/constraints-torch-%.txt: requirements/constraints.txt | $(PY)
	@sed 's/^torch==.*/torch==$*/' $< > $@

packages := pyproject.toml hatch_build.py requirements/needed.py $(PINS)

# The compiler of the native library comes first. pip compiles no bytecode: most of it is of modules that are never
# imported. The pip that comes with Python takes twice as long as a new one to choose among the versions there are.
$(VENV)/.installed-compiler: $(packages) | $(PY)
	$(STEP) "set-up: a newer pip" $(VENV) $(PIP) --upgrade pip
	@$(PY) requirements/needed.py > $(VENV)/needed-to-build
	$(STEP) "set-up: Zig, which compiles the native library" $(VENV) $(PIP) --requirement $(VENV)/needed-to-build
	@touch $@

# One stamp for each set of packages; `dev` holds `test`. The compiler works beside pip, which has torch to unpack.
$(VENV)/.installed-$(EXTRA): $(packages) | $(PY) $(VENV)/.installed-compiler
	@$(PY) requirements/needed.py torch $(EXTRA) > $(VENV)/needed
	$(STEP) "set-up: native library; torch and what $(EXTRA) needs" $(VENV) sh -c '$(PY) hatch_build.py & compiler=$$!; \
		$(PIP) --requirement $(VENV)/needed && wait $$compiler || { kill $$compiler; exit 1; }'
	$(STEP) "set-up: trimesh, from this folder" $(VENV) $(PIP) --no-build-isolation --no-deps --editable .
	@touch $(VENV)/.installed-test $@

# The first install has just built the library; later only a change of its sources builds it anew.
$(LIBRARY): $(native_sources) hatch_build.py | $(VENV)/.installed-$(EXTRA)
	@$(PY) hatch_build.py
	@touch $@

setup: $(VENV)/.installed-$(EXTRA) $(LIBRARY)  ## the environment of `make demo` and `make test`
	@:

setup-dev:  ## the environment of `make check` and the rest
	@$(MAKE) --no-print-directory EXTRA=dev setup

# ---- run ---------------------------------------------------------------------------------------------------

demo: setup  ## train on four processes, kill one, carry on; with HOSTS=3 on three hosts, one of which is killed
	$(PY) $(if $(HOSTS),examples/train_bytes_on_hosts.py --hosts $(HOSTS),examples/train_bytes.py)

test: setup  ## the daily tests: seven minutes
	$(PYTEST) -m 'not stress' --tier daily -n $(WORKERS) $(PYTEST_ARGS)

# TIER=rest: without those of `make test`.
test-all: setup  ## all tests but the stress runs: half an hour
	$(PYTEST) -m 'not stress' --tier $(TIER) -n $(WORKERS) $(PYTEST_ARGS)

check: lint types layers zig-check  ## every static check, and the native library's tests

# Strict: a link or an anchor that leads nowhere is an error. The variable silences an advertisement.
site: setup-dev  ## the documentation as build/site, checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f website/mkdocs.yml
	$(PY) -m website.check build/site

# Installs the package, with torch, in an environment of its own below a temporary home folder.
tutorial: setup-dev  ## follow the tutorial literally, by its commands only
	$(PY) -m website.tutorial

lint: setup-dev  ## ruff: lint and format; spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell src native tests examples bench docs release tools website *.md *.toml *.py Makefile

format: setup-dev  ## let ruff and zig format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(ZIG) fmt build.zig native

types: mypy pyright  ## mypy and pyright

mypy: setup-dev
	$(BIN)/mypy

pyright: setup-dev
	$(BIN)/pyright --project pyproject.toml --pythonpath $(PY)

layers: setup-dev  ## import-linter: the floors
	$(BIN)/lint-imports --cache-dir .import_linter_cache

zig-check: $(VENV)/.installed-compiler  ## the native library: format, tests, and that it compiles for the other architecture
	$(ZIG) fmt --check build.zig native
	$(ZIG) build test
	$(ZIG) build -Dtarget=aarch64-linux-gnu.2.17 -Doptimize=Debug --prefix .cache/aarch64 --summary none

races: setup-dev  ## the native library's tests under ThreadSanitizer
	$(ZIG) build test -Dsanitize-thread

fuzz: setup-dev  ## fuzz the native decoders (FUZZ_COUNT inputs)
	.ci/fuzz $(PY) $(FUZZ_COUNT) $(FUZZ_MODE)

# Behaviours that are tested in simulation: the marker is set by what runs them, so the folders only save a search.
seeded := tests/conformance tests/testing examples -m 'mesh_seeded and not stress' -n $(WORKERS) \
	--timeout 1200 -o faulthandler_timeout=0

seeds: setup  ## every simulated behaviour under SEEDS seeds, from FIRST_SEED on
	$(PYTEST) $(seeded) --mesh-seeds $(SEEDS) --mesh-first-seed $(FIRST_SEED) $(PYTEST_ARGS)

# Each behaviour has the same share of the time. The first seed is printed; `make seeds FIRST_SEED=...` repeats it.
fresh-seeds: setup  ## the same under seeds that were never run, for SECONDS
	$(PYTEST) $(seeded) --mesh-first-seed fresh --mesh-seconds $(SECONDS) $(PYTEST_ARGS)

# What state machines answer to tests/scenarios/scripts, written anew; the diff is what is reviewed.
scenarios: setup  ## write the expected part of scenario scripts anew
	$(PYTEST) tests/scenarios -q --rewrite-scenarios $(PYTEST_ARGS)

# Emulated, so slow: it boots a Debian kernel with RDMA in software. Says SKIPPED where that cannot be had.
test-verbs: setup  ## bulk data over real RDMA verbs, without an adapter (QEMU)
	$(PY) -m tests.verbs

# A skipped test would look like one that has passed, so a machine without a device fails at once.
test-cuda: setup  ## all tests that need a CUDA device, where torch sees one
	$(PY) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make test-cuda needs a CUDA device, and torch finds none: install a torch for CUDA in $(VENV)")'
	$(PYTEST) -m cuda -p no:xdist $(PYTEST_ARGS)

# GPU machines often have no network, and a Python and a torch of their own: CUDA_PYTHON is its version.
CUDA_PYTHON  ?= 3.12
CUDA_MACHINE ?= x86_64
CUDA_UCX     ?= cu13
cuda-bundle: setup  ## build/cuda-bundle: tests and figures for a GPU machine without network (CUDA_PYTHON=3.12)
	$(PY) -m tests.cuda.bundle --python $(CUDA_PYTHON) --machine $(CUDA_MACHINE) --ucx $(CUDA_UCX)

# A minute of processor time, so it is for the hand; in CI it would take that from tests.
COVERAGE_FLOOR ?= 97
coverage: setup-dev  ## branch coverage of the pure floors by their own tests; fails below COVERAGE_FLOOR percent
	$(BIN)/coverage run -m pytest tests/shape tests/events tests/routing tests/supervision tests/wire tests/scenarios \
		-q -p no:xdist $(PYTEST_ARGS)
	$(BIN)/coverage report --skip-covered --precision 1 --fail-under $(COVERAGE_FLOOR) --include \
		'src/trimesh/shape/*,src/trimesh/events/*,src/trimesh/_routing/*,src/trimesh/_supervision/*,src/trimesh/_wire/*'

# Repeated, pinned to one core, beside two busy loops, then the hundred-round runs.
stress: setup  ## minutes of repetition under bad conditions
	.ci/stress $(PY) $(STRESS_RUNS)

# WORKLOAD=hosts runs for MINUTES: real hosts in network namespaces, which suffer; it needs root and nftables.
soak: setup  ## SCHEDULES of a WORKLOAD (mixed, pool, loop, or hosts: for MINUTES), every rule watched
	$(PY) -m tests.soak.run --schedules $(SCHEDULES) --processes $(WORKERS) --first-seed $(FIRST_SEED) \
		--workload $(WORKLOAD) --minutes $(MINUTES)

tensor-fuzz: setup  ## PROGRAMS of random operations on global tensors, compared with plain torch
	$(PY) -m tests.tensor.judge --programs $(PROGRAMS) --first-seed $(FIRST_SEED) --seconds $(SECONDS)

trainings-fuzz: setup  ## PROGRAMS random trainings under plans, pipelines and checkpoints, compared with plain torch
	$(PY) -m tests.tensor.trainings --trainings $(PROGRAMS) --first-seed $(FIRST_SEED) --seconds $(SECONDS)

tensor-training: setup  ## a whole GPT under each plan, a kill and a resume, STEPS each, beside plain torch; minutes
	$(PY) -m tests.tensor.whole_gpt --steps $(STEPS)

mutate: setup  ## change FILES by machine, and show what their tests do not find, for SECONDS
	$(PY) -m tests.mutation.run $(FILES) --seconds $(SECONDS) --sample $(SAMPLE) --seed $(FIRST_SEED) \
		$(if $(TESTS),--tests $(TESTS)) $(if $(ONLY),--only "$(ONLY)")

mutations: setup  ## plant bugs in the runtime, and find the first seed that shows each
	$(PY) -m tests.soak.run --mutation all

# First FAST restarts in a row, then the load and a kill every EVERY seconds; counts and memory are compared.
soak-proc: setup  ## real processes under load, killed for MINUTES
	$(PY) -m tests.stress.soak --minutes $(MINUTES) --every $(EVERY) --fast $(FAST)

# Each kind has its share of the MINUTES; KINDS="pin fetch" are these alone.
soak-alone: setup  ## one kind of operation at a time for MINUTES: memory, descriptors and threads stay flat
	$(PY) -m tests.stress.soak.alone --minutes $(MINUTES) $(KINDS)

bench: setup  ## figures beside torchmonarch, Ray and xoscar, in one run
	$(PY) bench/run.py

bench-smoke: setup  ## its trimesh sides, shortened to prove that they run
	$(PY) bench/run.py --smoke --no-peer
	$(PY) -m bench.profile call_one --smoke

build-native: setup-dev  ## compile the native library after a change
	$(PY) hatch_build.py

wheel: | $(PY)  ## dist/*.whl for this machine (TRIMESH_ZIG_TARGET for another)
	$(PY) -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .

changelog: | $(PY)  ## move the fragments of changelog.d/ into CHANGELOG.md
	$(PY) -m release.changelog

# Everything but the upload, checked; REHEARSE=1 before the changelog has the version. Minutes.
release:  ## the files of a release as dist/, for four targets, checked
	@$(MAKE) --no-print-directory EXTRA=release setup
	$(PY) -m release $(if $(REHEARSE),--rehearse)

clean:  ## remove what was built, keep the environments
	rm -rf build dist .zig-cache zig-out .mypy_cache .pytest_cache .ruff_cache .import_linter_cache $(LIBRARY)
