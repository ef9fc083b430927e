# make demo | test | proof | extras | check | bench | wheel | clean. Everything runs from .venv, which is made when it is not there.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PIP_FLAGS ?=
DEMO_FLAGS ?=
TEST_FLAGS ?=

.PHONY: install demo test proof extras check bench wheel clean

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Serinus needs Python 3.11 or newer: make PYTHON=python3.11')"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -e '.[dev]'
	$(BIN)/python -c "from serinus.kernels import load, warm; warm(load('cpu'))"
	touch $@

demo: $(STAMP)
	$(BIN)/serinus demo $(DEMO_FLAGS)

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TEST_FLAGS)

proof: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'proof and not gpu' $(TEST_FLAGS)

extras: $(STAMP)
	@$(BIN)/python -c "import ctypes; ctypes.CDLL('libibverbs.so.1')" 2>/dev/null || { echo "make extras: this machine has no libibverbs.so.1, which the backend mooncake needs: apt-get install libibverbs1"; exit 1; }
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -e '.[dev,nixl,mooncake,clients]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/extras $(TEST_FLAGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict serinus
	$(BIN)/python -m pytest tests/tidy

bench: $(STAMP)
	$(BIN)/python benchmarks/table.py --run --write README.md

wheel: $(STAMP)
	$(BIN)/python -m build

clean:
	rm -rf .venv build dist *.egg-info demo-checkpoint .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
