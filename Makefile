# Two commands for a new user: `make quickstart`, `make test`.  Both set up .venv themselves.
PYTHON ?= python3
PROFILE ?= mini
BIN := .venv/bin

quickstart: .venv/installed  ## train and compare three models on the embedded benchmark
	@mkdir -p results/$(PROFILE)
	$(BIN)/papermill notebooks/00_quickstart.ipynb results/$(PROFILE)/00_quickstart.ipynb -p profile $(PROFILE) \
		-k python3 --cwd notebooks --log-output --no-progress-bar
	@echo "executed notebook: results/$(PROFILE)/00_quickstart.ipynb"

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
