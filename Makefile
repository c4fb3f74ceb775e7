# The two commands of the README: `make run` and `make test`. Both set up .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
DEMO := runs/demo

.PHONY: run test lint types unit clean

run: $(VENV)/run.done
	$(BIN)/dat train digits-standard --workers $(WORKERS) --out $(DEMO)/standard --overwrite
	$(BIN)/dat train digits --workers $(WORKERS) --out $(DEMO)/dat-pgd --overwrite
	$(BIN)/dat compare $(DEMO)/standard $(DEMO)/dat-pgd

test: lint types unit

lint: $(VENV)/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.done
	$(BIN)/mypy

unit: $(VENV)/dev.done
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not alone"
	$(BIN)/python -m pytest -m alone

$(VENV)/run.done: pyproject.toml constraints.txt src/dat/comm/kernel.c src/dat/optim/kernel.c src/dat/native.c
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/dev.done: $(VENV)/run.done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
