import json

import pytest
import torch

from lightning_sparse.__main__ import main
from lightning_sparse.bench import layer_cases, layers
from lightning_sparse.bench.layer_cases import Contest, LayerCase

KEYS = {"layer", "case", "device", "seconds", "dense_seconds", "speedup", "crossover"}


@pytest.fixture
def small(monkeypatch):
    """The cases as they are, of smaller layers."""
    cpu = torch.device("cpu")
    cases = [
        layer_cases._blocks(64, 96, 16, 0.5, 8, cpu),
        layer_cases._blocks(50, 70, 32, 0.5, 3, cpu),
        layer_cases._nm(8, 64, 8, cpu),
    ]
    monkeypatch.setattr(layers, "CASES", [lambda device, quick: iter(cases[: 2 if quick else 3])])


def test_layers(small, tmp_path, capsys):
    out, plot = tmp_path / "rows.json", tmp_path / "rows.png"
    main(["bench", "layers", "--repeats", "1", "--json", str(out), "--plot", str(plot)])
    result = json.loads(out.read_text())
    assert set(result) == {"machine", "versions", "rows"}
    assert [row["layer"] for row in result["rows"]] == ["BlockSparseLinear", "BlockSparseLinear", "NM"]
    assert result["rows"][1]["case"] == "50x70, block 32, density 0.5, 3 rows, fp32"
    for row in result["rows"]:
        assert set(row) == KEYS
        assert row["device"] == "cpu"
        assert row["speedup"] == pytest.approx(row["dense_seconds"] / row["seconds"])
        assert row["crossover"] is None if row["layer"] == "NM" else 0 <= row["crossover"] <= 1
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    assert f"{result['rows'][0]['speedup']:.2f}" in table


def test_quick_and_only(small, tmp_path):
    out = tmp_path / "rows.json"
    for options, count in ((["--quick"], 2), (["--only", "nm"], 1), (["--only", "BLOCK 32"], 1)):
        main(["bench", "layers", "--repeats", "1", "--json", str(out), *options])
        assert len(json.loads(out.read_text())["rows"]) == count
    with pytest.raises(SystemExit, match="expected part of a case of BlockSparseLinear, NM, got 'lstm'"):
        main(["bench", "layers", "--only", "lstm"])


def test_wrong_results_are_not_timed(monkeypatch):
    timed = []
    contest = Contest(lambda: None, lambda: timed.append(1), lambda: False)
    monkeypatch.setattr(layers, "CASES", [lambda device, quick: iter([LayerCase("NM", "broken", lambda: contest)])])
    with pytest.raises(RuntimeError, match="NM, broken: a wrong result"):
        main(["bench", "layers"])
    assert not timed


@pytest.mark.parametrize(
    "make", [lambda cpu: layer_cases._blocks(64, 96, 16, 0.5, 8, cpu), lambda cpu: layer_cases._nm(8, 64, 8, cpu)]
)
def test_checks_notice_a_wrong_gradient(make):
    contest = make(torch.device("cpu")).make()
    contest.sparse()
    assert contest.check()
    contest.dense()
    assert not contest.check()


@pytest.mark.parametrize("quick", [True, False])
def test_every_layer_has_cases_for_every_device(quick):
    for device in ("cpu", "cuda"):
        found = [case for cases in layer_cases.CASES for case in cases(torch.device(device), quick)]
        assert {"BlockSparseLinear", "NM"} <= {case.layer for case in found}
        assert len({(case.layer, case.case) for case in found}) == len(found)
