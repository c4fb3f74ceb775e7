# The two commands of the README: `make run` and `make test`; `make docs` builds the site. Each sets
# up .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
DEMO := runs/demo

.PHONY: run test lint types unit docs clean

run: $(VENV)/run.done
	$(BIN)/dat train digits-standard --workers $(WORKERS) --out $(DEMO)/standard --overwrite
	$(BIN)/dat train digits --workers $(WORKERS) --out $(DEMO)/dat-pgd --overwrite
	$(BIN)/dat compare $(DEMO)/standard $(DEMO)/dat-pgd
	$(BIN)/dat report $(DEMO)/standard $(DEMO)/dat-pgd --out $(DEMO)/report.html

test: lint types unit

lint: $(VENV)/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.done
	$(BIN)/mypy

unit: $(VENV)/dev.done
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not alone"
	$(BIN)/python -m pytest -m alone

# --strict: a broken link is an error. The theme announces its end of support (May 2027) at each build.
docs: $(VENV)/docs.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/run.done: pyproject.toml constraints.txt src/dat/native.c $(wildcard src/dat/*/*.c src/dat/*/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/dev.done: $(VENV)/run.done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/docs.done: $(VENV)/run.done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) runs site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
