# The commands that people and CI share. Each target makes the virtual environment it needs.
PYTHON ?= python3
VENV := .venv
BENCH_VENV := .venv-bench
PIP_FLAGS := --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint bench clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) torch
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --editable '.[test]'
	touch $@

$(BENCH_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install $(PIP_FLAGS) torch
	$(BENCH_VENV)/bin/python -m pip install $(PIP_FLAGS) --editable '.[bench]'
	touch $@

demo: $(VENV)/installed
	$(VENV)/bin/python -m examples.demo --out out/demo

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest -n 2

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(BENCH_VENV)/installed
	$(BENCH_VENV)/bin/python -m benchmarks.run --out benchmarks/results

clean:
	rm -rf $(VENV) $(BENCH_VENV) out build dist *.egg-info
