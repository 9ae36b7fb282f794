# For a new user: `make quickstart`, `make test`, `make study`.  All set up .venv themselves.
PYTHON ?= python3
PROFILE ?= mini
BIN := .venv/bin

quickstart: .venv/installed  ## compare three models on the embedded benchmark
	$(BIN)/python -m pumalib run 00 --profile $(PROFILE)

study: .venv/installed  ## every table and figure (PROFILE=mini)
	$(BIN)/python -m pumalib run --profile $(PROFILE)

test: .venv/installed  ## every test, and every notebook at its smoke setting
	$(BIN)/python -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout 600 tests notebooks

lab: .venv/installed  ## open JupyterLab
	$(BIN)/jupyter lab notebooks

.venv/installed: requirements.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -r requirements.txt
	@touch $@

.PHONY: quickstart study test lab
