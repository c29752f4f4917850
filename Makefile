# The commands that people and CI share. Each target makes the virtual environment it needs.
PYTHON ?= python3
VENV := .venv
BENCH_VENV := .venv-bench
FLA_VENV := .venv-fla
TRITON_VENV := .venv-triton
# Most of what torch installs is never imported, and compiling it takes longer than the rest. What is imported is
# compiled then, once for all processes, unless something forbids it.
PIP := --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
PIP_FLAGS := $(PIP) --constraint constraints.txt
TRITON_PIP_FLAGS := $(PIP) --constraint constraints-triton.txt
# Neighbouring tests share models, builds and what they expect; what is left of the longest is divided anew.
PYTEST := -m pytest -n 2 --dist worksteal

.PHONY: demo test test-fla test-kernels test-compiler compile-all lint bench clean

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

$(FLA_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FLA_VENV)
	$(FLA_VENV)/bin/python -m pip install $(PIP_FLAGS) torch
	$(FLA_VENV)/bin/python -m pip install $(PIP_FLAGS) --editable '.[test,fla]'
	touch $@

# triton-ascend has wheels up to Python 3.11, and numpy 2.2 none below 3.10.
$(TRITON_VENV)/installed: pyproject.toml constraints-triton.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v in ((3, 10), (3, 11)) or sys.exit("triton-ascend needs Python 3.10 or 3.11, $(PYTHON) is %d.%d: make PYTHON=python3.11 ..." % v)'
	$(PYTHON) -m venv $(TRITON_VENV)
	$(TRITON_VENV)/bin/python -m pip install $(TRITON_PIP_FLAGS) torch
	$(TRITON_VENV)/bin/python -m pip install $(TRITON_PIP_FLAGS) --editable '.[compile]' pytest pytest-xdist hypothesis
	touch $@

demo: $(VENV)/installed
	$(VENV)/bin/python -m examples.demo --out out/demo

test: $(VENV)/installed
	$(VENV)/bin/python $(PYTEST)

# With FLA 0.6 and the community's triton installed, on a machine without a GPU.
test-fla: $(FLA_VENV)/installed
	$(FLA_VENV)/bin/python $(PYTEST) tests/integrations/test_fla_backend.py

# Triton's interpreter and its compiler cannot be used by one process.
test-kernels: $(TRITON_VENV)/installed
	TRITON_INTERPRET=1 $(TRITON_VENV)/bin/python $(PYTEST) tests/kernels

test-compiler: $(TRITON_VENV)/installed
	env -u TRITON_INTERPRET $(TRITON_VENV)/bin/python $(PYTEST) tests/compiler

# Hours on two cores. Writes the committed table and docs/compiled.md.
compile-all: $(TRITON_VENV)/installed
	$(TRITON_VENV)/bin/python -m benchmarks.compiled

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(BENCH_VENV)/installed
	$(BENCH_VENV)/bin/python -m benchmarks.run --out benchmarks/results

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(FLA_VENV) $(TRITON_VENV) out build dist *.egg-info
