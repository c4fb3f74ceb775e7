# `make run` and `make test` are the README's two commands; `make help` lists all of them. Each
# installs what it needs into .venv first.
PYTHON ?= python3
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
DEMO := runs/demo
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt --progress-bar off
# pip's own lines, one a package, without the hints and hosts between them
SHOW := grep --line-buffered -E '^(Collecting|Downloading|Building|Installing|Successfully|ERROR)|rror:' \
	| sed -u -E 's/^Collecting ([^ ]+).*/  collecting \1/; s/^Installing collected packages.*/  unpacking (the longest part)/; s/^Successfully installed.*/  installed/'
PYTEST := $(BIN)/python -m pytest

.PHONY: run test test-slow test-all lint types unit slow docs clean help

run: $(VENV)/run.done  ## train a digit classifier, standard and robust, and compare them
	$(BIN)/dat train digits-standard --workers $(WORKERS) --out $(DEMO)/standard --overwrite
	$(BIN)/dat train digits --workers $(WORKERS) --out $(DEMO)/dat-pgd --overwrite
	$(BIN)/dat compare $(DEMO)/standard $(DEMO)/dat-pgd
	$(BIN)/dat report $(DEMO)/standard $(DEMO)/dat-pgd --out $(DEMO)/report.html

test: lint types unit  ## lint, types, and the tests that protect behaviour: minutes

test-slow: $(VENV)/slow.done  ## launchers, kills, browser, site, wheels, other frameworks, long fuzzing
	$(PYTEST) -n auto --dist loadfile -m "(slow or fuzz) and not alone" --hypothesis-profile thorough
	$(PYTEST) -m alone

test-all: test test-slow  ## both

lint: $(VENV)/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.done
	$(BIN)/mypy

unit: $(VENV)/dev.done
	$(PYTEST) -n auto --dist loadfile --no-loadscope-reorder -m "not slow"

# --strict: a broken link is an error. The theme announces its end of support (May 2027) at each build.
docs: $(VENV)/docs.done  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/run.done: pyproject.toml constraints.txt $(wildcard src/dat/kernels/*.c src/dat/kernels/*/*.c src/dat/kernels/*/*.h)
	@echo "Setting up $(VENV): PyTorch and what DAT needs (about a minute with a warm cache)"
	@$(PYTHON) -m venv $(VENV)
	@set -o pipefail; $(PIP) -e . 2>&1 | $(SHOW)
	@touch $@

$(VENV)/%.done: $(VENV)/run.done
	@echo "Adding what '$*' needs to $(VENV)"
	@set -o pipefail; $(PIP) -e '.[$*]' 2>&1 | $(SHOW)
	@touch $@

$(VENV)/slow.done: $(VENV)/dev.done

clean:  ## remove the environment, runs and builds
	rm -rf $(VENV) runs site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */make \1\t/' | expand -t 18
