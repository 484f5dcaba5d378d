import json
import sys

import pytest
import torch

from lightning_sparse import timing
from lightning_sparse.__main__ import main
from lightning_sparse.bench import kernel_case, kernels, kit

KEYS = {
    "op",
    "device",
    "dtype",
    "numel",
    "density",
    "seconds",
    "ns_per_element",
    "bytes_per_element",
    "percent_of_copy",
}
OPS = ["memcpy", "accumulate_select", "difference_select", "select", "momentum_select", "radix_select"]
OPS += ["sampled_quantile", "moments", "scatter_mean", "torch_topk", "torch_sort", "unfused"]


def test_kernels(tmp_path, capsys):
    out, plot = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ["bench", "kernels", "--sizes", "2e3", "4001", "--repeats", "1"]
    main([*arguments, "--json", str(out), "--plot", str(plot)])
    result = json.loads(out.read_text())
    assert set(result) == {"machine", "versions", "rows"}
    assert result["machine"]["threads"] == 1
    assert {"lightning_sparse", "torch", "python"} <= set(result["versions"])
    assert len(result["rows"]) == 2 * len(kernels.DENSITIES) * len(kernel_case.DTYPES) * len(OPS)
    assert [row["op"] for row in result["rows"][: len(OPS)]] == OPS
    for row in result["rows"]:
        assert set(row) == KEYS
        assert row["numel"] in (2000, 4001)
        assert row["seconds"] > 0
        assert row["ns_per_element"] == pytest.approx(row["seconds"] * 1e9 / row["numel"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "accumulate_select" in capsys.readouterr().out


def test_wrong_results_are_not_timed(monkeypatch):
    monkeypatch.setattr(kernel_case, "scatter_add_", lambda *_: None)
    with pytest.raises(RuntimeError, match="scatter_mean gave a wrong result"):
        main(["bench", "kernels", "--sizes", "1000", "--repeats", "1"])


def test_sizes_beyond_memory_are_left_out(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kit, "free_bytes", lambda _: 3000 * kernels.BYTES_PER_ELEMENT)
    out = tmp_path / "rows.json"
    main(["bench", "kernels", "--sizes", "2000", "1e12", "--repeats", "1", "--json", str(out)])
    assert {row["numel"] for row in json.loads(out.read_text())["rows"]} == {2000}
    assert "left out what does not fit in memory: sizes above 3000" in caplog.text


def test_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        kit.pyplot()


def test_medians_leave_out_the_first_turn():
    calls = []
    seconds = kit.time_alternating(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, torch.device("cpu")
    )
    assert calls == ["a", "b"] * 3
    assert set(seconds) == {"a", "b"}


def test_slow_runs_sit_out_later_turns(monkeypatch):
    calls = []
    monkeypatch.setattr(timing, "seconds_of", lambda run, _: run())
    runs = {"slow": lambda: calls.append("slow") or 3.0, "fast": lambda: calls.append("fast") or 0.5}
    assert kit.time_alternating(runs, 4, torch.device("cpu"), budget=2.0) == {"slow": 3.0, "fast": 0.5}
    assert calls.count("slow") == 2
    assert calls.count("fast") == 5


def test_free_memory():
    assert kit.free_bytes(torch.device("cpu")) > 2**20
