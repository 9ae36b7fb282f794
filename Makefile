# For a new user: `make quickstart`, `make test`, `make study`.  All set up .venv themselves.
# For a GPU: `make gpu`; after a stop, again (docs/gpu.md).
PYTHON ?= python3
PROFILE ?= mini
RESULTS ?= results
SITE ?= build/site
REPORT ?= build
BIN := .venv/bin
PHOTOS ?= photos
FAULTS ?= 1000
SEED := $(or $(SEED),$(shell date +%s))
GPU_PYTHON ?= $(BIN)/python
GPU_DONE = build/gpu-tests $(patsubst %,results/bench/%-cuda.csv,training losses search data decoders small)
# Before each step of a GPU; where one is lent for minutes: GPU_LIMIT='timeout --foreground --signal=INT --kill-after=9 530'.
GPU_LIMIT ?=
GPU_RUN = $(strip $(GPU_LIMIT) $(GPU_PYTHON))
# A step that has succeeded leaves a stamp, and is not taken again.
GPU_STEP = $(GPU_PYTHON) tools/once.py build/gpu $(GPU_RUN)
# The paper's tables in the order of docs/costs.md: a table's runs are mostly those of tables before it.
PAPER_TABLES = 00 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 18 19 21 22 23 28 29 30 32 17
# Options of each, such as '-p micro_batch=auto' for a small card.
PAPER ?=
FIRST = [linear, full, puma, adapter-stochastic, adapter, prompt-pool, adaptformer]
TRIAL ?= photos-8
TRIAL_METHODS = [linear, mlp3, vpt, prompt-pool, lora, lora-stochastic, adaptformer, adapter, adapter-stochastic, puma, full]
# The last method that 91 finds a setting for: a profile that has it has them all.
LAST_TUNED = mlp3
# The rows that are searched at 16 epochs, and what that gave, for 32 epochs, for the drawn splits and for a model of
# each dataset (docs/protocol-changes.md, 43).
LONGER_METHODS = [puma, full, lora, adapter, adapter-stochastic, linear]
LONGER = {puma: {lr: 3.0e-4, adapter_scale: 0.1}, full: {lr: 3.0e-5, new_lr_factor: 10}, lora: {lr: 3.0e-5, lora_scale: 1}, adapter: {lr: 1.0e-4, adapter_scale: 0.1}, adapter-stochastic: {lr: 3.0e-4, adapter_scale: 0.1}, linear: {lr: 1.0e-4, loss_lr_factor: 1000}}
SPLIT_METHODS = [puma, full, lora, adapter, adapter-stochastic]
# The methods that get a model of each dataset, and those of them whose models see as many images as the universal one.
# The first two runs of 08, on held-out classes, chose these by the harmonic mean (docs/protocol-changes.md, 67).
SPECIFIC = [CurricularFace, PUMA]
SAME_IMAGES = [CurricularFace, PUMA]
MORE_SEEDS = [0, 1, 2, 3, 4, 5]
FEW_SEEDS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
IMBALANCE_METHODS = [full, linear, lora, adaptformer, adapter, adapter-stochastic, vpt, puma]
# PLAN=--plan trains nothing: it prints the runs that are left, and their hours.
# PLAN=--kept trains nothing: it executes the notebooks anew, as each new row moves the pooled spread of all intervals.
PLAN ?=
TRIAL_RUN = $(or $(STEP),$(BIN)/python) -m puma_study run $(PLAN) --profile
PHOTOS_RUN = $(or $(STEP),$(BIN)/python) -m puma_study run $(PLAN) --profile $(PHOTOS)

quickstart: .venv/installed  ## train three models on this machine and compare them with the kept runs
	$(BIN)/python -m puma_study run 00 --profile quickstart

study: .venv/installed  ## every table and figure of the kept runs (PROFILE=mini); trains nothing
	$(BIN)/python -m puma_study run --profile $(PROFILE) --kept

test: .venv/installed  ## formatting, types, every test, and every notebook at its smoke setting
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy -n 2
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --nbval-lax --nbval-current-env --nbval-cell-timeout 600 tests notebooks

faults: .venv/installed  ## a thousand faults drawn by a seed that it prints (SEED=, FAULTS=; docs/reliability.md)
	@echo "$(FAULTS) faults, SEED=$(SEED)"
	$(BIN)/python -m pytest -q tests/test_faults.py --faults $(FAULTS) --seed $(SEED)

site: .venv/installed  ## executed notebooks, docs, docstrings, and the report where `make report` built it: $(SITE)/_build/index.html
	rm -rf $(SITE)
	$(BIN)/python docs/site/gather.py $(RESULTS) $(REPORT) $(SITE)
	$(BIN)/python -m sphinx -q -d $(SITE)/.read $(SITE) $(SITE)/_build
	$(BIN)/python docs/site/check.py $(SITE)/_build

report: .venv/installed  ## the numbers of README.md and docs anew, and the report: $(REPORT)/report.html, report.pdf
	$(BIN)/python -m tools pages --build $(REPORT)

photos: $(if $(STEP),,.venv/installed)  ## the rows on real photographs (docs/photos.md): 06, 03, 02, 08, 14, 12, 11, 18, 17; hours on a CPU
	$(PHOTOS_RUN) 06 -p 'methods=$(FIRST)'
	$(PHOTOS_RUN) 06 -p 'methods=[linear, mlp3, vpt, lora, lora-stochastic, adaptformer, prompt-pool, adapter, adapter-stochastic, puma, full]'
	$(PHOTOS_RUN) 03 -p 'components=[single, conditional, static, stochastic, conditional + stochastic]'
	$(PHOTOS_RUN) 02 -p 'methods=[specific CurricularFace, universal CosFace, universal PA, universal MS, universal CurricularFace, Linear Emb., MLP-3 Emb., VPT, LoRA, AdaptFormer, PUMA]'
	$(PHOTOS_RUN) 08 -p 'methods=[CurricularFace]'
	$(PHOTOS_RUN) 14 -p loss=curricularface -p 'pictures=[characters_omniglot, emoji_emojione]'
	$(PHOTOS_RUN) 12 -p 'ranks=[0, 128]' -p 'lengths=[0, 8]' -p 'pools=[20]'
	$(PHOTOS_RUN) 11 -p 'shots=[1, 4, 16]'
	$(PHOTOS_RUN) 18 -p 'factors=[1, 4]' -p 'methods=[full, adapter, adapter-stochastic, puma]'
	$(PHOTOS_RUN) 17

trial: $(if $(STEP),,.venv/installed)  ## the trial in the order of docs/protocol.md: tuning, headline, convergence, imbalance, when PUMA wins; days on a CPU
	$(TRIAL_RUN) $(TRIAL) 91
	@for name in $(TRIAL) $(TRIAL)-reversed $(TRIAL)-balanced photos-21k; do grep -q '^  $(LAST_TUNED): ' notebooks/profiles/$$name.yaml \
	|| { echo "what follows needs the settings that 91 has found: copy what it prints under 'recipes:' in notebooks/profiles/$$name.yaml"; exit 1; }; done
	$(TRIAL_RUN) $(TRIAL) 06 -p 'methods=$(TRIAL_METHODS)'
	$(TRIAL_RUN) $(TRIAL) 03 -p 'components=[single, conditional, static, stochastic, conditional + stochastic]'
	$(TRIAL_RUN) $(TRIAL) 02 -p 'methods=[universal CurricularFace, Linear Emb., MLP-3 Emb., VPT, LoRA, AdaptFormer, PUMA]'
	$(TRIAL_RUN) $(TRIAL) 18 -p 'factors=[1, 4]' -p 'methods=[full, puma]' -p 'recipes=$(LONGER)'
	$(TRIAL_RUN) $(TRIAL) 91 -p 'methods=$(LONGER_METHODS)' -p 'checks=[mirroring, length, convergence]'
	$(TRIAL_RUN) photos-21k 06 -p 'methods=[full, lora, adapter, puma]'
	$(TRIAL_RUN) $(TRIAL)-reversed 06 -p 'methods=$(IMBALANCE_METHODS)'
	$(TRIAL_RUN) $(TRIAL)-balanced 06 -p 'methods=$(IMBALANCE_METHODS)'
	$(TRIAL_RUN) $(TRIAL) 30
	$(TRIAL_RUN) $(TRIAL) 28
	$(TRIAL_RUN) $(TRIAL) 11
	$(TRIAL_RUN) $(TRIAL) 05 -p 'losses=[ProxyNCA++, Triplet, MS, CurricularFace]'
	$(TRIAL_RUN) $(TRIAL)-classes-1 06 -p 'methods=$(SPLIT_METHODS)'
	$(TRIAL_RUN) $(TRIAL)-classes-2 06 -p 'methods=$(SPLIT_METHODS)'
	$(TRIAL_RUN) $(TRIAL)-classes-3 06 -p 'methods=$(SPLIT_METHODS)'
	$(TRIAL_RUN) $(TRIAL) 34 -p train_missing=true
	$(TRIAL_RUN) $(TRIAL) 18 -p 'factors=[1, 4]' -p 'methods=$(LONGER_METHODS)' -p 'recipes=$(LONGER)'
	$(TRIAL_RUN) $(TRIAL) 08 -p 'methods=$(SPECIFIC)' -p 'recipes=$(LONGER)' -p holdout=true -p 'seeds=[0]'
	$(TRIAL_RUN) $(TRIAL) 08 -p 'methods=$(SPECIFIC)' -p 'recipes=$(LONGER)' -p holdout=true -p 'seeds=[0]' -p 'same_images=$(SPECIFIC)'
	$(TRIAL_RUN) $(TRIAL) 08 -p 'methods=$(SPECIFIC)' -p 'recipes=$(LONGER)' -p 'same_images=$(SAME_IMAGES)'
	$(TRIAL_RUN) $(TRIAL) 11 -p 'shots=[16]' -p 'methods=[full, PUMA]' -p 'seeds=$(FEW_SEEDS)'
	$(TRIAL_RUN) $(TRIAL) 06 -p 'methods=[full, lora, adaptformer]' -p 'seeds=$(MORE_SEEDS)'
	$(TRIAL_RUN) $(TRIAL) 06 -p 'methods=[full]' -p 'seeds=$(MORE_SEEDS)' -p 'recipes=$(LONGER)'
	$(TRIAL_RUN) $(TRIAL) 18 -p 'factors=[1, 4]' -p 'further={puma: [16], full: [16]}' -p 'methods=$(LONGER_METHODS)' -p 'recipes=$(LONGER)' -p 'side_seeds=[0]'
	# The copies of two notebooks again, whole, with what came after them: by --kept a step of its own for `make gpu`.
	$(TRIAL_RUN) $(TRIAL) 06 --kept -p 'methods=$(TRIAL_METHODS)'
	$(TRIAL_RUN) $(TRIAL) 11 --kept
	$(TRIAL_RUN) $(TRIAL) 19 -p train_missing=true
	$(TRIAL_RUN) photos 19 --kept
	$(TRIAL_RUN) $(TRIAL) 17

# The last loss that 94 finds a rate for.
LAST_LOSS = normsoftmax
needs_rates = @grep -q '^  full/$(LAST_LOSS): ' notebooks/profiles/$(1).yaml \
	|| { echo "what follows needs the rates that 94 has found: copy what it prints under 'recipes:' in notebooks/profiles/$(1).yaml"; exit 1; }

survey: $(if $(STEP),,.venv/installed)  ## the survey's statements on real images, in the order of docs/protocol.md; a day on a CPU
	$(TRIAL_RUN) photos-21k 94
	$(call needs_rates,photos-21k)
	$(TRIAL_RUN) faces 27
	$(TRIAL_RUN) emoji 94 -p 'losses_=[proxynca, proxyanchor, proxygml, softtriple]'
	$(call needs_rates,emoji)
	$(TRIAL_RUN) emoji 26
	$(TRIAL_RUN) photos-21k 22 -p method=full -p 'datasets=[birds_cub50, cars_196, emoji_emojione]' -p 'sources=[words, characters, pseudo]' -p 'weights=[7.5]'
	$(TRIAL_RUN) photos-21k 21 -p 'methods=[full]'
	$(TRIAL_RUN) photos-21k 31
	$(TRIAL_RUN) photos-21k 32 -p 'methods=[full]'
	$(TRIAL_RUN) photos-21k 33
	$(TRIAL_RUN) photos-21k 23 -p method=full -p 'datasets=[birds_cub50, cars_196]'
	$(TRIAL_RUN) mini 29
	@for name in photos-21k emoji faces mini; do $(TRIAL_RUN) $$name 25 || exit 1; done

gpu: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
gpu: $(if $(filter $(BIN)/%,$(GPU_PYTHON)),.venv/installed)  ## on a GPU: needs, tests, the speed, `photos`, the trial, a row of it in float32
	$(GPU_PYTHON) -c 'import faiss, ipykernel, papermill, pooch, pydantic, pytest, pytorch_metric_learning; import torch; assert torch.cuda.is_available(), "torch sees no GPU"'
	$(GPU_STEP) -m puma_study run 06 03 02 08 12 11 18 --profile photos-gpu --plan
	$(GPU_STEP) -m puma_study run 06 03 02 18 --profile $(TRIAL) --plan
	$(MAKE) $(GPU_DONE)
	$(GPU_STEP) -m puma_study run 06 --profile photos-gpu -p 'seeds=[0]' -p 'methods=$(FIRST)'
	$(MAKE) photos PHOTOS=photos-gpu STEP='$(GPU_STEP)'
	$(MAKE) trial STEP='$(GPU_STEP)'
	$(GPU_STEP) -m puma_study runs train puma --profile $(TRIAL) -p precision=float32
	@echo all done

gpu-paper: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
gpu-paper: $(if $(filter $(BIN)/%,$(GPU_PYTHON)),.venv/installed)  ## on a GPU: every table of the paper at its own setting, one after another; weeks
	$(GPU_STEP) -m puma_study run $(PAPER_TABLES) --profile paper $(PAPER) --plan
	@for table in $(PAPER_TABLES); do $(GPU_STEP) -m puma_study run $$table --profile paper $(PAPER) || exit 1; done
	@echo all done

build/gpu-tests:
	$(GPU_RUN) -m pytest -q tests/test_evaluation.py tests/test_training.py tests/test_losses.py tests/test_models.py
	mkdir -p build && touch $@

results/bench/%-cuda.csv:
	$(GPU_RUN) -m tools bench $* --size full --device cuda

# The root is the project: the index shows pictures of results/.
lab: .venv/installed  ## open JupyterLab at the index of the notebooks
	$(BIN)/jupyter lab --ServerApp.root_dir=$(CURDIR) notebooks/index.ipynb

.venv/installed: requirements.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -r requirements.txt
	@touch $@

.PHONY: quickstart study test faults site report photos trial survey gpu gpu-paper lab
