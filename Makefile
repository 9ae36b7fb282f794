# For a new user: `make quickstart`, `make test`, `make study`.  All set up .venv themselves.
PYTHON ?= python3
PROFILE ?= mini
BIN := .venv/bin

quickstart: .venv/installed  ## train three models on this machine and compare them with the kept runs
	$(BIN)/python -m pumalib run 00 --profile quickstart

study: .venv/installed  ## every table and figure of the kept runs (PROFILE=mini); trains nothing
	$(BIN)/python -m pumalib run --profile $(PROFILE) --kept

test: .venv/installed  ## formatting, every test, and every notebook at its smoke setting
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/python -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout 600 tests notebooks

lab: .venv/installed  ## open JupyterLab
	$(BIN)/jupyter lab notebooks

.venv/installed: requirements.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -r requirements.txt
	@touch $@

.PHONY: quickstart study test lab
