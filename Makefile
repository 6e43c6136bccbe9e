# Everything a contributor or a curious visitor runs. `make help` lists the targets.
#
# One virtual environment, .venv, is made once and reused; delete it with `make clean`. PYTHON chooses the interpreter.
# On Linux, PyPI's PyTorch brings CUDA libraries along; for the small CPU build:
#     make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_PIP := $(FRAMEWORKS)/bin/python -m pip --disable-pip-version-check install --quiet
PIP := $(BIN)/python -m pip --disable-pip-version-check
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# Where PYTHONDONTWRITEBYTECODE is set, each worker would compile all tests, 10 s of a core, and do so again each time.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations 10
# `make gpu` installs nothing: torch with CUDA and stepscope are those of this Python.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_ARGS ?=
DEMO := examples/cifar_png
# what the built front end depends on; an installation builds it anew when one of these has changed (hatch_build.py)
WEB := hatch_build.py $(shell find web -type f -not -path 'web/node_modules/*' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo demo-fix test test-all frameworks golden fuzz guard check docs bench zoo gpu clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1	/' | expand -t 16

demo: $(VENV)/installed ## record the slow example and show what it loses time to
	$(BIN)/python $(DEMO)/make_data.py
	$(BIN)/stepscope run -- $(BIN)/python $(DEMO)/train.py

demo-fix: demo ## try the fixes that the demo's findings name, then knobs on a script whose main loss only an edit removes (about 12 minutes)
	$(BIN)/stepscope experiment --from $$(ls -d stepscope-runs/[0-9]*-train | tail -n 1) -- $(BIN)/python $(DEMO)/train.py
	$(BIN)/stepscope experiment --from findings -- $(BIN)/python examples/naive_gpt/train.py

test: $(VENV)/installed-dev ## run all tests; of those that start processes of their own, each file's one after the other
	$(PYTEST) $(PYTEST_ARGS)

test-all: $(VENV)/installed-dev ## with the variants, and the examples of properties, that `test` leaves out for time
	$(PYTEST) -m "not frameworks" --hypothesis-profile all $(PYTEST_ARGS)

frameworks: $(VENV)/installed-dev $(FRAMEWORKS)/installed ## record real loops of Trainer, Lightning, Accelerate, ... and compare with what they count (about 15 minutes)
	$(BIN)/python -m pytest -n 0 -m frameworks tests/frameworks $(PYTEST_ARGS)

golden: $(VENV)/installed-dev ## keep what every surface says of known inputs, for the tests that compare with it
	$(BIN)/python -m tests.golden

fuzz: $(VENV)/installed-dev ## read 10,000 damaged inputs (about 30 minutes; FUZZ_ARGS="--cases 500")
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

guard: $(VENV)/installed-dev ## count the work of reading and analysis; more than its ceiling fails
	$(BIN)/python benchmarks/guard.py

check: $(VENV)/installed-dev ## lint, formatting, strict types (the front end's where npm is), layer contracts, unused names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/unused.py
	@if command -v npm >/dev/null && [ -d web/node_modules ]; then cd web && npm run check; \
	else echo "no npm here: the front end's types are not checked"; fi

docs: $(VENV)/installed-docs ## build the documentation as a site into site/; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/installed ## measure our overhead and our reader into benchmarks/RESULTS.md (about 75 minutes; keep the machine idle)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/read.py
	$(BIN)/python benchmarks/stacks.py
	$(BIN)/python benchmarks/statistics.py
	$(BIN)/python benchmarks/same_program.py
	$(BIN)/python benchmarks/dashboard.py
	$(BIN)/python benchmarks/cold_caches.py
	$(BIN)/python benchmarks/sinks.py

zoo: $(VENV)/installed ## score the diagnosis on scripts with a known cost, beside TraceML (about 15 minutes; keep the machine idle)
	$(BIN)/python benchmarks/zoo/run.py

gpu: ## check device figures, planted costs, knobs and what recording costs on this machine's CUDA device (8 minutes); GPU_PYTHON=... chooses the Python
	$(GPU_PYTHON) benchmarks/gpu/check.py $(GPU_ARGS)

clean: ## delete the environment, caches, example data and recorded runs
	rm -rf $(VENV) $(FRAMEWORKS) site web/node_modules src/stepscope/dashboard/static .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache benchmarks/.peers stepscope-runs benchmarks/zoo/stepscope-runs examples/*/data
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps say which installation is complete; an interrupted one is done again.
$(VENV)/installed: pyproject.toml constraints.txt $(WEB)
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet 'pip>=25.1'
	$(PIP) install --quiet $(INDEX) -c constraints.txt -e . torch pillow
	$(BIN)/python -m compileall -q src/stepscope # where PYTHONDONTWRITEBYTECODE is set, every start would compile them
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) install --quiet $(INDEX) -c constraints.txt -e '.[tensorboard,wandb,mlflow,trackio,sweep,cluster,agents,fix]' --group test --group check
	touch $@

$(VENV)/installed-docs: $(VENV)/installed pyproject.toml
	$(PIP) install --quiet --group docs
	touch $@

$(FRAMEWORKS)/installed: $(wildcard tests/frameworks/requirements*.txt) constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS_PIP) $(INDEX) -c constraints.txt -r tests/frameworks/requirements.txt
	$(FRAMEWORKS_PIP) --no-deps -r tests/frameworks/requirements-alone.txt
	touch $@
