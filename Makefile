# Two commands do all set-up: `make demo` and `make test`. Everything goes into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE := 1

.PHONY: demo test test-all check bench docs clean

$(VENV)/app: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[app]'
	touch $@

$(VENV)/dev: $(VENV)/app
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/app
	@$(BIN)/ditpar generate "red apple" --ranks 2 --seed 42 --out out/demo.png
	@echo "The picture that two ranks made is at $(CURDIR)/out/demo.png"

test: $(VENV)/dev
	$(BIN)/python -m pytest -q -m "not slow"

test-all: $(VENV)/dev
	$(BIN)/python -m pytest -q

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@# The folders lie apart in the repository; the import check wants them as they install.
	@rm -rf build/tree && mkdir -p build/tree && cp -rs $(CURDIR)/ditpar build/tree/ && rm build/tree/ditpar/kernels.py
	@cp -rs $(CURDIR)/app $(CURDIR)/kernels $(CURDIR)/pipelines build/tree/ditpar/ && touch build/tree/ditpar/kernels/__init__.py
	cd build/tree && $(CURDIR)/$(BIN)/lint-imports --no-cache ../../pyproject.toml
	@$(BIN)/python tools/check_size.py

bench: $(VENV)/dev
	$(BIN)/python benchmarks/overhead.py

docs: $(VENV)/dev
	DITPAR_WRITE_DOCS=1 $(BIN)/python -m pytest -q tests/test_parity.py tests/test_schedulers.py

clean:
	rm -rf $(VENV) build out *.egg-info
