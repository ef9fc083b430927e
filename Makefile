# make demo | test | proof | extras | check | bench | docs | pictures | wheel | clean. Everything runs from .venv, which is made when it is not there.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.dev
DEMO := .venv/.demo
PIP_FLAGS ?=
# Python compiles a module when it is first imported: of the 15,000 here few ever are, and pip would spend a minute on all
PIP = $(BIN)/python -m pip install -q --no-compile $(PIP_FLAGS)
DEMO_FLAGS ?=
TEST_FLAGS ?=
JOBS ?= 2
# Where the environment says to write no bytecode, each process that a test starts would compile torch again: 4 s
export PYTHONDONTWRITEBYTECODE :=
# tests/conftest.py orders files.
# A worker that crashes ends the run and names its test: replaced, xdist would wait for the rest of its file for ever
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
CHROMIUM := { command -v chromium || command -v google-chrome; } >/dev/null

.PHONY: install demo test proof extras check bench docs pictures pictures-plots pictures-page browser wheel clean

install: $(STAMP)

$(DEMO) $(STAMP): pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Serinus needs Python 3.11 or newer: make PYTHON=python3.11')"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e '.[$(@F:.%=%)]'
	$(BIN)/python -c "from serinus.kernels import load, warm; warm(load('cpu'))"
	touch $@

demo: $(or $(wildcard $(STAMP)),$(DEMO))
	$(BIN)/serinus demo $(DEMO_FLAGS)

test: $(STAMP)
	$(PYTEST) $(TEST_FLAGS)

proof: $(STAMP) browser
	$(PIP) -e '.[dev,proof]'
	$(PYTEST) --timeout 900 -m 'proof and not gpu' $$($(CHROMIUM) || echo --ignore=tests/browser) $(TEST_FLAGS)

extras: $(STAMP)
	@$(BIN)/python -c "import ctypes; ctypes.CDLL('libibverbs.so.1')" 2>/dev/null || { echo "make extras: this machine has no libibverbs.so.1, which the backend mooncake needs: apt-get install libibverbs1"; exit 1; }
	$(PIP) -e '.[dev,nixl,mooncake,clients]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/extras $(TEST_FLAGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict serinus
	$(BIN)/python -m pytest tests/tidy

bench: $(STAMP)
	$(BIN)/python benchmarks/table.py --run --write README.md

.venv/.docs: $(STAMP)
	$(PIP) -e '.[dev,docs]'
	touch $@

docs: .venv/.docs
	$(BIN)/mkdocs build --strict
	@echo "the site is build/site/index.html"

pictures: pictures-plots pictures-page

pictures-plots: .venv/.docs
	$(BIN)/python scripts/drawings.py --write docs/pictures
	$(BIN)/python scripts/plots.py --write docs/pictures
	$(BIN)/serinus sim --seed 1234 --timeline docs/pictures/sim-1234.svg

pictures-page: $(STAMP) browser
	OMP_NUM_THREADS=1 $(BIN)/python scripts/pictures_page.py docs/pictures

browser:
	@$(CHROMIUM) || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || echo "no Chromium, and it could not be installed (as root: apt-get install chromium): the tests of the dashboard in a browser are left out"

wheel: $(STAMP)
	$(BIN)/python -m build

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
