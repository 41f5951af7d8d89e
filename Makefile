# Everything runs from .venv, which is made when it is missing or older than what it is made from.
# Another Python, another JAX: make clean, then make PYTHON=python3.13 JAX=0.11.1 test

PYTHON ?= python3
BENCH ?= ppo-cartpole
WORKERS ?= 2
BIN := .venv/bin
STAMP := .venv/.installed
TESTS := .venv/.installed-tests
ALL := .venv/.installed-all
PINS := $(if $(JAX),.venv/constraints.txt,constraints.txt)
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Where no bytecode is to lie beside the sources, each of the hundreds of processes that tests start would compile the
# libraries again (import jax: 4.3 CPU-seconds, 1.3 with bytecode; the files of tests: 46 and 18): it goes to .venv.
ifneq ($(PYTHONDONTWRITEBYTECODE),)
  unexport PYTHONDONTWRITEBYTECODE
  export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/bytecode
endif

# glibc's allocator is a sixth of what XLA's compiler takes: a thread that keeps the small blocks it freed, and large
# pages, leave two programs of the tests at 9.2 CPU-seconds (11.4 without).
test tests test-all kernels lint: export GLIBC_TUNABLES ?= glibc.malloc.tcache_count=60000:glibc.malloc.hugetlb=1

.DEFAULT_GOAL := help
.PHONY: help train test test-all fuzz bench docs lint kernels tests clean

help:
	@echo "make train     train the driving policy (ARGS='--total-steps 100000' and the like are passed on)"
	@echo "make test      lint and the tests (test-all: the slow ones too)"
	@echo "make fuzz      ten minutes of damaged input for every reader (ARGS='--minutes 1')"
	@echo "make bench     one benchmark, BENCH=$(BENCH)"
	@echo "make docs      the documentation as a site, in site/"
	@echo "make lint      ruff and mypy"
	@echo "make clean     remove .venv and the caches; runs/ stays"

EXTRA_$(TESTS) := [test]
EXTRA_$(ALL) := [test-all]
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

# A .venv that works is kept (and brought up to date); a broken or half-made one is replaced.
# `make train` installs what training needs; `make test` the tools and extras of the tests on top; `make test-all` those of
# the slow tests, 23,000 files more. uv takes 23 CPU-seconds for those of `make test`, pip 60. It knows nothing of pip's
# settings: where pip has another index, pip does it. Python compiles what it imports, which is a small part of what is
# installed; and a pip older than 26 takes twice as long over the index's pages.
$(ALL): $(TESTS)
$(STAMP) $(TESTS) $(ALL): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(NEW_ENOUGH)' 2>/dev/null || { \
	  echo "longhaul needs Python 3.11 or newer, but '$(PYTHON)' is older or does not run: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	@echo "installing into .venv (about a minute)"
	@$(BIN)/python -c 'import pip; $(NEW_ENOUGH)' 2>/dev/null || { rm -rf .venv; $(PYTHON) -m venv .venv; }
	@$(if $(JAX),sed -E 's/^(jax|jaxlib)==[0-9.]+/\1==$(JAX)/' constraints.txt > $(PINS))
	@{ ! $(BIN)/python -m pip config list | grep -qE '\.(index-url|no-index)=' && $(PIP) -c $(PINS) uv && \
	  $(BIN)/uv pip install --quiet --python $(BIN)/python -c $(PINS) -e '.$(EXTRA_$@)'; } || { \
	  echo "going on with pip"; \
	  $(PIP) 'pip>=26' || echo "going on with the pip that is there"; \
	  $(PIP) -c $(PINS) -e '.$(EXTRA_$@)'; }
	@touch $@

train: $(STAMP)
	$(BIN)/longhaul train driving $(ARGS)

# mypy, and what numba compiles once for all workers, take the gaps that the tests leave on two cores.
test: $(TESTS)
	@$(MAKE) --no-print-directory --jobs 3 lint kernels tests

tests: $(TESTS)
	QUICK_COMPILE=1 $(PYTEST) $(ARGS)

test-all: $(ALL) lint
	$(PYTEST) -m "slow or not slow" $(ARGS)

fuzz: $(TESTS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINS) -e '.[test,fuzz]'
	$(BIN)/python -m benchmarks.guided_fuzz $(ARGS)

bench: $(STAMP)
	$(BIN)/longhaul bench $(BENCH) $(ARGS)

docs: $(ALL)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

kernels: $(TESTS)
	@$(BIN)/python -m tests.helpers.kernels

lint: $(TESTS)
	$(BIN)/ruff check .
	nice $(BIN)/mypy

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
