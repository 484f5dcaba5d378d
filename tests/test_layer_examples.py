"""The examples that compare layers, run as a user runs them, and what they make their text into."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparse.nn.crossover import pinned

EXAMPLES = Path(__file__).parents[1] / "examples"
MODULES = ("cli", "common", "corpus", "layer_tables", "layers", "report", "train_lstm", "train_slide")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the examples as the scripts do."""
    monkeypatch.syspath_prepend(EXAMPLES)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(MODULES) & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Gives a script some kilobytes of words to read."""
    words = [f"w{i * i % 97}" for i in range(3000)]
    texts = [torch.tensor(list(" ".join(part).encode()), dtype=torch.uint8) for part in (words[:2500], words[2500:])]
    return lambda script: monkeypatch.setattr(script, "read", lambda: texts)


@pytest.mark.parametrize(
    ("script", "arguments", "variants", "parameters"),
    [
        ("train_lstm", ["--hidden", "8"], ["dense", "sparse", "mixed"], 256 * 128 + 4 * 8 * (128 + 8 + 2) + 256 * 9),
        (
            "train_slide",
            ["--tail", "4", "--bucket", "2"],
            ["softmax", "lsh", "sampled"],
            # 49 words, and one for those of the validation text
            50 * 64 + 128 * (6 * 64 + 1) + 50 * 129,
        ),
    ],
)
def test_variants_train_with_the_same_parameters(
    load: Any, text: Any, script: str, arguments: list[str], variants: list[str], parameters: int, tmp_path: Path
) -> None:
    module, file = load(script), tmp_path / "out/rows.json"
    text(module)
    threads = torch.get_num_threads()
    with pinned(1):
        module.main([*arguments, "--max-steps", "3", "--batch-size", "4", "--json", str(file)])
    torch.set_num_threads(threads)
    rows = json.loads(file.read_text())
    assert [row["variant"] for row in rows] == variants
    for row in rows:
        assert (row["steps"], row["parameters"]) == (3, parameters)
        # not far from a uniform guess
        assert 2 < row["val_loss"] < 8
        steps, seconds, losses = zip(*row["curve"], strict=True)
        assert list(steps) == list(range(1, len(steps) + 1))
        assert list(seconds) == sorted(seconds)
        assert row["val_loss"] == losses[2]
        assert seconds[-1] >= rows[0]["seconds"]
        assert row["equal_time_val_loss"] == losses[row["equal_time_steps"] - 1]


def test_words_are_numbered_by_how_often_they_occur(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slide = load("train_slide")
    texts = [torch.tensor(list(text), dtype=torch.uint8) for text in (b"if x_1: y = x_1 + b\nif", b"y = new")]
    monkeypatch.setattr(slide, "read", lambda: texts)
    train, val, words = slide.read_words()
    # "if" and "x_1" occur twice; of the others the order of characters decides
    numbers = {"if": 1, "x_1": 2, "+": 3, ":": 4, "=": 5, "b": 6, "y": 7}
    assert train.tolist() == [numbers[word] for word in ["if", "x_1", ":", "y", "=", "x_1", "+", "b", "if"]]
    assert val.tolist() == [7, 5, 0]
    assert words == 8


def test_places_depend_on_seed_and_index_only_and_validation_words_are_known(load: Any) -> None:
    slide = load("train_slide")
    text = torch.arange(1, 101) % 7
    train, val = slide.make_loaders(text, text, batch_size=5, max_steps=4, seed=3)
    assert (len(train), len(val.dataset)) == (4, slide.VALIDATION_WORDS)
    for context, word in train:
        assert context.shape == (5, slide.CONTEXT)
        assert torch.equal((context[:, -1] + 1) % 7, word)
    again, _ = slide.make_loaders(text, text, batch_size=5, max_steps=9, seed=3)
    assert torch.equal(again.dataset[7][0], train.dataset[7][0])
    assert all(bool((word > 0).all()) for _, word in val)


def test_mixed_makes_every_second_step_densely(load: Any) -> None:
    lstm = load("train_lstm").make_lstm("mixed", 8, 0.5)
    assert [lstm.density(step) for step in range(4)] == [1.0, 0.5, 1.0, 0.5]


def test_table(load: Any) -> None:
    rows = [
        {"variant": "a", "seconds_per_step": 0.2, "val_loss": 2.0, "equal_time_val_loss": 2.0, "equal_time_steps": 10},
        {"variant": "b", "seconds_per_step": 0.1, "val_loss": 2.1, "equal_time_val_loss": 1.9, "equal_time_steps": 20},
    ]
    lines = load("layer_tables").table(rows).splitlines()
    assert lines[2:] == [
        "| `a` | 200 | 2.0000 | 2.0000 | 10 |",
        "| `b` | 100 | 2.1000 (+5.00%) | 1.9000 (-5.00%) | 20 |",
    ]


@pytest.mark.parametrize("name", ["lstm", "slide"])
def test_the_readme_holds_the_tables_that_the_results_give(load: Any, name: str) -> None:
    rows = json.loads((EXAMPLES / f"results/layers/{name}.json").read_text())
    assert load("layer_tables").table(rows) in (EXAMPLES.parent / "README.md").read_text()
