# The two commands are `make test` and `make demo`; each does everything that it needs from a fresh
# clone: system packages, a virtual environment, the build. `make help` lists the rest.
#
#   PYTHON=python3.12   the interpreter of the virtual environment
#   WERROR=ON           warnings are errors (always so in CI and in the core's own presets)
#   PYTEST="-k zero"    arguments for pytest
#   TORCH=2.15.0        another torch than the pinned one, for make test-torch and make smoke
#   JOBS=2              compile jobs and tests at once
#   CORE_TESTS=OFF      without the core's tests that `make sanitize` runs as well (so in CI)

PYTHON_GIVEN := $(if $(filter undefined,$(origin PYTHON)),,$(PYTHON))
PYTHON ?= python3
VENV ?= $(shell sh tools/choose_venv.sh $(PYTHON_GIVEN))
JOBS ?= $(shell nproc)
WERROR ?= $(if $(CI),ON,OFF)
CORE_TESTS ?= $(if $(CI),OFF,ON)

VENV := $(VENV)
VENV_PYTHON := $(VENV)/bin/python
BUILD := build/python$(patsubst .venv%,%,$(notdir $(VENV)))
STAMPS := build/stamps
SYSTEM := $(STAMPS)/system-$(notdir $(PYTHON))
# Tests start hundreds of processes, and importing torch takes twice as long where Python may not keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- what the machine must have ---------------------------------------------------------------------

$(SYSTEM): tools/system_packages.sh
	@sh tools/system_packages.sh $(PYTHON)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/bench $(STAMPS)/lint: tools/system_packages.sh
	@sh tools/system_packages.sh $(PYTHON) $(@F)
	@mkdir -p $(STAMPS) && touch $@

$(VENV)/.strata-ready: requirements.txt tools/python_environment.sh | $(SYSTEM)
	@echo "Bringing $(VENV) to the pinned requirements"
	@sh tools/python_environment.sh $(PYTHON) $(VENV)
	@touch $@

# Python keeps what it compiles of these. Else all workers of pytest would compile the same at once.
COMPILED_ONCE = torch._inductor.compile_fx, transformers.trainer, deepspeed, peft, trl.trainer.sft_trainer, trl.trainer.grpo_trainer
$(VENV)/.strata-tests: requirements-test.txt $(VENV)/.strata-ready
	@echo "Bringing $(VENV) to the pinned requirements of the tests"
	@sh tools/python_environment.sh $(PYTHON) $(VENV) tests
	@DS_ACCELERATOR=cpu $(VENV_PYTHON) -c "import $(COMPILED_ONCE)" > $@-imports 2>&1 || cat $@-imports
	@touch $@

.PHONY: setup
setup: $(VENV)/.strata-tests  ## System packages and the virtual environment

# --- the build --------------------------------------------------------------------------------------

# A configuration is redone by ninja itself when a CMake file changes; here, when its inputs do.
CONFIGURED := $(BUILD)/.configured-$(WERROR)-$(CORE_TESTS)
$(CONFIGURED): CMakePresets.json $(VENV)/.strata-ready
	cmake --preset python -B $(BUILD) -DSTRATA_WERROR=$(WERROR) -DSTRATA_CORE_TESTS=$(CORE_TESTS) \
	  -DPython_EXECUTABLE=$(abspath $(VENV_PYTHON)) --log-level=NOTICE
	@rm -f $(BUILD)/.configured-* && touch $@

# CUDA kernels are nvcc's work, the same for each of these: those of the build above serve, where they are made.
FATBIN = -DSTRATA_CUDA_FATBIN=$(abspath $(wildcard $(BUILD)/src/strata/device/cuda_kernels.fatbin))
build/dev/build.ninja build/tsan/build.ninja: CMakePresets.json | $(SYSTEM)
	cmake --preset $(notdir $(@D)) --log-level=NOTICE $(FATBIN)
	@touch $@

build/asan/build.ninja build/clang/build.ninja: CMakePresets.json | $(STAMPS)/lint
	cmake --preset $(notdir $(@D)) --log-level=NOTICE $(FATBIN)
	@touch $@

# `import strata` in the virtual environment is this build, and so is its program `strata`; STRATA_COMPAT works as where
# the wheel is installed.
LINK_PACKAGE = test ! -e $(BUILD)/bin/strata || ln -sf $(abspath $(BUILD))/bin/strata $(VENV)/bin/strata; \
  $(VENV_PYTHON) -c "import pathlib, sysconfig; \
  site = pathlib.Path(sysconfig.get_paths()['purelib']); \
  pathlib.Path(site, 'strata-build.pth').write_text('$(abspath $(BUILD))/pkg\n'); \
  pathlib.Path(site, 'strata-compat.pth').write_text(pathlib.Path('python/strata/compat/strata-compat.pth').read_text())"

.PHONY: build module package core
build: $(CONFIGURED)  ## Everything: core, torch layer, Python module, C++ tests
	ninja -C $(BUILD) -j $(JOBS)
	@$(LINK_PACKAGE)

module: $(CONFIGURED)  ## The Python package and the program `strata`
	ninja -C $(BUILD) -j $(JOBS) strata_package strata_program
	@$(LINK_PACKAGE)

package: $(CONFIGURED)  # what the demo needs
	ninja -C $(BUILD) -j $(JOBS) strata_package
	@$(LINK_PACKAGE)

core: build/dev/build.ninja  ## The torch-free core and its tests
	ninja -C build/dev -j $(JOBS)

# --- the work ---------------------------------------------------------------------------------------

# Ranks wait for each other, for their processes to start and for deadlines: one Python test more than there
# are cores keeps those busy. Each worker holds a process with torch in memory.
PYTHON_JOBS ?= $(shell echo $$(( $(JOBS) < 8 ? $(JOBS) + 1 : 8 )))
RUN_TESTS = $(VENV_PYTHON) tools/run_tests.py $(BUILD) --jobs $(JOBS)

.PHONY: test test-bench test-torch smoke test-newest test-transformers soak test-gpu test-core demo bench-cpu sanitize
.PHONY: wheel wheels
test: $(CONFIGURED)  ## All C++ and Python tests; ends with "N passed, N failed"
	@$(MAKE) --no-print-directory -j 2 build $(VENV)/.strata-tests  # one downloads while the other compiles
	$(RUN_TESTS) -- -n $(PYTHON_JOBS) --dist loadgroup $(PYTEST)

test-bench: module $(VENV)/.strata-tests  ## The tests of the benchmarks themselves, on CPU ranks
	ninja -C $(BUILD) -j $(JOBS) startup_limit
	$(RUN_TESTS) --python-only -- tests/bench -n $(PYTHON_JOBS) --dist loadgroup $(PYTEST)

# Another version of torch, in an environment and a build folder of its own.
test-torch:  ## All tests beside another torch: make test-torch TORCH=2.15.0 PYTEST="-k zero"
	$(MAKE) test VENV=.venv-torch-$(TORCH) TORCH=$(TORCH) CORE_TESTS=OFF

smoke:  ## Two ranks at each stage, a compiled step and a checkpoint beside another torch: TORCH=2.15.0
	$(MAKE) package VENV=.venv-torch-$(TORCH) TORCH=$(TORCH) CORE_TESTS=OFF
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 .venv-torch-$(TORCH)/bin/torchrun --standalone --nproc-per-node 2 \
	  tests/soak/wheels/job.py $$(mktemp -d)

# Of transformers, loading and saving use what changes between its versions. tools/transformers_environment.sh says which
# accelerate, peft and trl a version gets.
OTHERS = build/transformers-$(VERSION)$(patsubst .venv%,%,$(notdir $(VENV)))
MEETS_TRANSFORMERS = $(patsubst %,tests/python/test_%.py,adapters architectures early_runtime grpo_example \
  hugging_face hugging_face_errors load_save repeated_blocks strata_trainer strata_trainer_trl supported_transformers) $(wildcard tests/python/test_transformers*.py)
test-newest: VERSION := newest
test-newest: test-transformers  ## Tests that meet transformers, with the newest of it, accelerate, peft and trl

VERSION ?= $(error VERSION is missing: make test-transformers VERSION=4.57.6)
test-transformers: module $(VENV)/.strata-tests  ## The same with another version: make test-transformers VERSION=4.57.6
	sh tools/transformers_environment.sh $(VENV) $(OTHERS) $(VERSION)
	PYTHONPATH=$(abspath $(BUILD))/pkg $(OTHERS)/bin/python -m pytest -n $(PYTHON_JOBS) --dist loadgroup \
	  $(MEETS_TRANSFORMERS) $(PYTEST)

# Frameworks that train over DeepSpeed, each in an environment of its own.
FRAMEWORKS := build/frameworks$(patsubst .venv%,%,$(notdir $(VENV)))
soak: export STRATA_FRAMEWORKS = $(abspath $(FRAMEWORKS))
soak: export STRATA_SOAK = 1
# Whose tests without the mark have more cases then.
soak: MORE_IN_SOAK = $(addprefix tests/,python/test_offload.py python/test_optimizer_bits.py python/test_sequence_parallel.py python/test_sizing_page.py bench/test_step.py)
soak: build $(VENV)/.strata-tests  ## Long versions: a hundred architectures, disks that fail, ranks that are killed
	STRATA_FAULT_SEEDS=10000 $(BUILD)/tests/engine/checkpoint/engine_checkpoint_tests --gtest_filter='*FailingDisk.*'
	STRATA_ADAM_BITS=31250000 $(BUILD)/tests/device/device_tests --gtest_filter='Cuda/*AnyBits'
	STRATA_DRIVE_SEEDS=100000 $(BUILD)/tests/engine/core/engine_tests --gtest_filter='FailingDrive.*'
	$(MAKE) sanitize STRATA_DRIVE_SEEDS=200 STRATA_FAULT_SEEDS=200 CASES=-soak
	$(RUN_TESTS) --python-only -- tests/python tests/bench -m soak -n $(PYTHON_JOBS) --dist loadgroup $(PYTEST)
	$(RUN_TESTS) --python-only -- $(MORE_IN_SOAK) -m "not soak" -n $(PYTHON_JOBS) --dist loadgroup $(PYTEST)
	STRATA_KILLS=200 $(RUN_TESTS) --python-only -- tests/python/test_saving_training.py -k kill $(PYTEST)
	STRATA_KILLS=1000 $(RUN_TESTS) --python-only -- tests/python/test_killed_writers.py $(PYTEST)
	STRATA_TRAINER_STEPS=20 $(RUN_TESTS) --python-only -- tests/python/test_hugging_face.py tests/python/test_strata_trainer.py tests/python/test_strata_trainer_trl.py $(PYTEST)
	sh tools/framework_environments.sh $(VENV) $(FRAMEWORKS)
	$(RUN_TESTS) --python-only -- tests/soak -n $(PYTHON_JOBS) $(PYTEST)

# Ranks share the GPU where there is one; what wants one for each rank is skipped by name. Tests that fill
# a device or time it are among the C++ ones, which run first and alone, or wait until no other test has ranks.
GPU_JOBS ?= 8
test-gpu: build $(VENV)/.strata-tests  ## All tests with models on the GPU, GPU_JOBS=8 Python tests at once
	STRATA_TEST_DEVICE=cuda $(VENV_PYTHON) tools/run_tests.py $(BUILD) --jobs 1 -- \
	  -n $(GPU_JOBS) --dist loadgroup $(PYTEST)

test-core: core  ## The core's tests alone: seconds
	$(PYTHON) tools/run_tests.py build/dev --cpp-only --label core --jobs $(JOBS)

# A rank for each GPU, or two that share the cores; then another number goes on from their checkpoint, where there is
# one GPU two on the CPU. torchrun warns where nobody says how many threads each takes.
demo: package  ## Train a small Qwen3 at ZeRO stage 3, save, and go on with another number of ranks
	ranks=$$($(VENV_PYTHON) -c "import torch; print(torch.cuda.device_count() or 2)"); \
	run() { OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(( ($$(nproc) + $$1 - 1) / $$1 ))} \
	  $(VENV)/bin/torchrun --standalone --nproc_per_node="$$@"; }; \
	run $$ranks examples/train_stdlib.py --config examples/ds_config.json $(DEMO); \
	others=$$(( ranks == 1 ? 2 : ranks - 1 )); \
	if [ $$ranks = 1 ]; then export CUDA_VISIBLE_DEVICES=; fi; \
	run $$others examples/train_stdlib.py --config examples/ds_config.json --resume --steps 20

bench-cpu: module $(VENV)/.strata-tests  ## Strata, FSDP2, DDP and DeepSpeed side by side on two CPU ranks
	DS_ACCELERATOR=cpu $(VENV_PYTHON) bench/bench_cpu.py $(BENCH)

# TSan's older runtimes want an address space that is not randomized; where a container forbids to ask
# for that, it has to do without.
FIXED_ADDRESSES = $(shell setarch -R true 2>/dev/null && echo setarch -R)

# Seeds of drives and disks that fail: fewer where each takes ten times as long.
# CASES=-soak runs the programs and cases, too, that are left out otherwise: CONTRIBUTING says which, and why.
TSAN_PROGRAMS = $(addsuffix _tests,base memory io checkpoint comm comm_peer engine_late)
TSAN_PROGRAMS-soak = all
sanitize: export STRATA_DRIVE_SEEDS ?= 40
sanitize: export STRATA_FAULT_SEEDS ?= 40
sanitize: build/asan/build.ninja build/tsan/build.ninja  ## The core with clang under ASan+UBSan, then with g++ under TSan
	ninja -C build/asan -j $(JOBS)
	nice -n 19 ninja -C build/tsan -j $(JOBS) $(TSAN_PROGRAMS$(CASES)) > build/tsan/log & building=$$!; \
	  ctest --preset asan$(CASES) -j $(JOBS); wait $$building || { cat build/tsan/log; exit 1; }
	$(FIXED_ADDRESSES) ctest --preset tsan$(CASES) -j $(JOBS)

wheel: $(SYSTEM)  ## A wheel for this Python and every supported torch, in dist/
	sh tools/build_wheel.sh $(PYTHON)

# Those that are installed among the supported ones.
WHEEL_PYTHONS ?= $(shell for p in 3.10 3.11 3.12 3.13 3.14 3.15; do python$$p -c "" 2>/dev/null && echo python$$p; done)
wheels: $(SYSTEM)  ## A wheel for each Python that is here, and the source package, in dist/
	for python in $(WHEEL_PYTHONS); do sh tools/build_wheel.sh $$python; done
	$(PYTHON) -m venv build/wheels/sdist-environment
	build/wheels/sdist-environment/bin/python -m pip install -q build
	build/wheels/sdist-environment/bin/python -m build --sdist -o dist .

# --- the site ---------------------------------------------------------------------------------------

SITE := build/site
$(SITE)/env/.ready: tools/requirements-site.txt tools/python_environment.sh | $(SYSTEM)
	@sh tools/python_environment.sh $(PYTHON) $(@D) site $(wildcard $(VENV)/bin/uv)
	@touch $@

.PHONY: site reference
site: $(SITE)/env/.ready  ## The documentation as a site, in build/site/html; a broken link fails
	@rm -rf $(SITE)/pages $(SITE)/html && mkdir -p $(SITE)/pages
	@cp -r --parents README.md CONTRIBUTING.md LICENSE docs bench/*.md $(SITE)/pages
	$(SITE)/env/bin/zensical build --clean --strict
	$(PYTHON) tools/check_site.py $(SITE)/html

reference: module  ## Writes docs/reference from docstrings and public headers
	PYTHONPATH=$(abspath $(BUILD))/pkg $(VENV_PYTHON) tools/reference.py

# --- the style --------------------------------------------------------------------------------------

CPP_FILES = $(shell git ls-files '*.h' '*.cpp')

.PHONY: format style tidy clang fuzz clean
format: $(STAMPS)/lint  ## clang-format on every C++ file
	clang-format -i $(CPP_FILES)

style: $(STAMPS)/lint  ## The style test and formatting: seconds
	$(PYTHON) -B tests/tidy/check_tree.py .
	@printf '%s\n' $(CPP_FILES) | xargs -n 60 -P $(JOBS) clang-format --dry-run --Werror

clang: build/clang/build.ninja  ## The core with clang, as clang-tidy reads it
	ninja -C build/clang -j $(JOBS)

# Over the files that join several of ours, since most of the time goes into what they all include.
tidy: style clang  ## The same and clang-tidy on the core: minutes
	find build/clang/src -name 'unity_*.cxx' | xargs -n 1 -P $(JOBS) clang-tidy -p build/clang --quiet
	git grep -l 'hwy/foreach_target.h' 'src/strata/*.cpp' | \
	  xargs -n 1 -P $(JOBS) clang-tidy -p build/clang --quiet

FUZZ_SECONDS ?= 60
FUZZ_TARGETS = safetensors_header manifest
fuzz: build/asan/build.ninja  ## libFuzzer over safetensors headers, then manifests, each for FUZZ_SECONDS=60
	ninja -C build/asan -j $(JOBS) $(addsuffix _fuzz,$(FUZZ_TARGETS))
	@for target in $(FUZZ_TARGETS); do \
	  corpus=build/asan/fuzz/corpus_$$target; mkdir -p $$corpus; \
	  echo "Fuzzing $$target for $(FUZZ_SECONDS) s, from fuzz/$${target}_seeds"; \
	  build/asan/fuzz/$${target}_fuzz -max_total_time=$(FUZZ_SECONDS) -timeout=10 -verbosity=0 -print_funcs=0 \
	    $$(ls fuzz/$$target.dict 2>/dev/null | sed 's/^/-dict=/') -print_final_stats=1 \
	    -artifact_prefix=build/asan/fuzz/ $$corpus fuzz/$${target}_seeds; \
	done
	@echo "Nothing crashed a parser."

clean:  ## Remove what was built; the virtual environment stays
	rm -rf build dist
