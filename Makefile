# Two commands for everybody: `make voice` and `make test`. The rest is for those who change the code.
#
#   PYTHON       the interpreter to make .venv with (3.11 to 3.13)
#   TORCH_INDEX  a pip index that has CPU builds of torch, where the default one would bring gigabytes of CUDA

PYTHON ?= python3
TORCH_INDEX ?=
BIN := .venv/bin
VOICE := examples/03_voice/pipeline.toml
PYTEST := $(BIN)/python -m pytest

.PHONY: voice test test-slow check format install weights bench clean

voice: weights  ## talk to the voice agent
	@$(BIN)/streamrt up $(VOICE)

test: weights  ## the tests that everybody runs: under 10 minutes on 2 cores
	@$(PYTEST) -m "not slow"

test-slow: weights  ## crash points, soaks, matrices
	@$(PYTEST) -m slow

check: install  ## formatting, lint, types, layers
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: install  ## what a hop between two processes costs, beside others
	@$(BIN)/python tests/perf/bench_hop.py

format: install
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
		|| { echo "make: streamrt needs Python 3.11 to 3.13 as '$(PYTHON)'; name another: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
		|| { echo "make: '$(PYTHON)' can not make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "installing into .venv (once, a few minutes)"
	@$(PYTHON) -m venv .venv
	@# torch by its exact version first: anything that only asks for "torch" would take a CUDA build.
	@$(BIN)/pip install -qq --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep '^torch==' constraints.txt)
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[torch,voice,media,diffusion,speedups,dev]'
	@touch $@

weights: install
	@$(BIN)/streamrt fetch $(VOICE)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
