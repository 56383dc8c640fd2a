# Each target is a first command: it installs what it needs into .venv. What is imported is compiled then, the rest never.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test docs bench coverage clean

demo: .venv/installed
	$(BIN)/bmrs demo

# Tests side by side, each with one thread: threads that wait for each other are slow. In the order of tests/conftest.py.
test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# The documentation, into site/index.html; a warning is an error.
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: .venv/installed
	$(BIN)/python benchmarks/scores.py

# The zoo's libraries without what they depend on: torchvision and timm ask for builds of torch that are not needed.
coverage: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps torchvision timm torch-pruning
	$(BIN)/python -m benchmarks.coverage

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache runs
