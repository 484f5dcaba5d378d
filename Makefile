# make demo    install, train with sparse_ddp and with ddp, compare (out/demo.json, out/demo.png)
# make test    install, run all tests
# make lint    ruff and mypy
# make clean   remove the environment, caches and outputs

PYTHON ?= python3
STEPS ?= 300
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt

.PHONY: demo test lint clean

demo: $(VENV)/examples.stamp
	$(BIN)/python examples/train_lm.py --strategy sparse_ddp --compare ddp --max-steps $(STEPS) \
		--json out/demo.json --plot out/demo.png

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Without an NVIDIA GPU torch's CPU build comes first: it is a tenth of the size. Where its index is out of reach, pip
# warns and takes the ordinary build.
$(VENV)/torch.stamp: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	command -v nvidia-smi > /dev/null || \
		$(INSTALL) --no-deps --retries 1 --timeout 15 \
			--extra-index-url https://download.pytorch.org/whl/cpu torch
	touch $@

$(VENV)/examples.stamp: pyproject.toml $(VENV)/torch.stamp
	$(INSTALL) -e ".[examples]"
	touch $@

$(VENV)/test.stamp: pyproject.toml $(VENV)/torch.stamp
	$(INSTALL) -e ".[test,examples]"
	touch $@

clean:
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
