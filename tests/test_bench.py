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
OPS += [
    "sampled_quantile",
    "moments",
    "top_k",
    "sampled_top_k",
    "decode_average",
    "torch_topk",
    "torch_sort",
    "unfused",
]


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
    monkeypatch.setattr(kernel_case.KernelCase, "decode_average", lambda _: None)
    with pytest.raises(RuntimeError, match="decode_average gave a wrong result"):
        main(["bench", "kernels", "--sizes", "1000", "--repeats", "1"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("kernels --sizes 0", "argument --sizes: expected a number above 0, got '0'"),
        ("kernels --sizes -5", "argument --sizes: expected a number above 0, got '-5'"),
        ("kernels --sizes nan", "argument --sizes: expected a number above 0, got 'nan'"),
        ("kernels --sizes 1.5", "argument --sizes: expected a whole number of at least 1, got '1.5'"),
        ("kernels --repeats 0", "argument --repeats: expected a number above 0, got '0'"),
        ("kernels --threads two", "argument --threads: expected a number above 0, got 'two'"),
        ("layers --device tpu", "argument --device: expected cpu or cuda, got 'tpu'"),
        (
            "kernels --json /proc/none/rows.json",
            "argument --json: expected a file that can be written, got",
        ),
        ("network --plot /", "argument --plot: expected a file that can be written, got '/': Is a directory"),
        ("convergence --density 1.5", "argument --density: expected a number in (0, 1], got '1.5'"),
        ("convergence --steps 0", "argument --steps: expected a number above 0, got '0'"),
    ],
)
def test_arguments_are_refused_before_anything_is_measured(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *words.split()])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_cuda_without_a_device_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["bench", "kernels", "--device", "cuda"])
    assert "argument --device: torch finds no CUDA device here: use --device cpu" in capsys.readouterr().err


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
