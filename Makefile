# Everything a user or a developer needs; `make` alone lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# processes that run tests side by side
WORKERS ?= 2
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-federation docs lint dev clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## install what the demo needs and run the methods side by side on real digits
	@$(BIN)/fedgist demo

test: lint ## lint, types, import rules and all tests
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-federation: $(VENV)/.dev ## a real federation on this machine, killed and resumed, and 20,000 schedules of faults: more than half an hour
	@$(BIN)/python -m pytest tests/federation -m federation

docs: $(VENV)/.docs ## the documentation as a site, in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

lint: $(VENV)/.dev ## lint, types and import rules only
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

dev: $(VENV)/.dev ## make .venv with everything for development

clean: ## remove .venv, caches and build outputs; results of runs stay
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps below say what .venv holds; they are renewed when pyproject.toml or constraints.txt change.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "fedgist needs Python 3.11 or newer; name one with: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "installing fedgist with the demo's dependencies into $(VENV) (a few minutes the first time)"
	@$(PIP_INSTALL) -e '.[demo,report]'
	@touch $@

# Development needs all that the demo needs, so both stamps are renewed.
$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "installing fedgist with the development dependencies into $(VENV) (a few minutes the first time)"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.demo $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "installing what builds the documentation into $(VENV)"
	@$(PIP_INSTALL) -e '.[docs]'
	@touch $@
