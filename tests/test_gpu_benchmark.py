"""The GPU benchmark, as far as a CPU can run it."""

import json
import math
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu


def test_without_a_gpu_it_names_the_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit, match=r"needs a CUDA GPU and torch finds none: --smoke runs it on the CPU"):
        gpu.main()


def test_the_smoke_run_writes_every_side_and_nothing_that_only_a_gpu_can_say(tmp_path):
    file = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--smoke", "--json", str(file)]
    subprocess.run(command, check=True, timeout=200)
    written = json.loads(file.read_text())
    rows = {row["side"]: row for row in written["rows"]}
    assert list(rows) == ["ours", "bf16", "torchao", "ours, 5%", "ours, 10%", "ours, gnmr"]
    assert all(0 < row["tokens_per_s"] < math.inf for row in rows.values())
    assert [row["recompiles"] for row in rows.values()] == [0] * 6
    assert rows["bf16"]["graphs"] == rows["torchao"]["graphs"] == 1  # one for all blocks
    # Of 63 units 3 run bf16, all in attention; or 6, half of them in the MLP, whose layers have twice the work.
    shares = {side: row["bf16_share"] for side, row in rows.items() if "bf16_share" in row}
    assert shares == pytest.approx({"ours": 0, "ours, 5%": 3 / 90, "ours, 10%": 9 / 90, "ours, gnmr": 0})
    speeds = {f"tokens_per_s_{side}": rows[side]["tokens_per_s"] for side in ("bf16", "torchao", "ours")}
    ratio = rows["ours"]["tokens_per_s"] / rows["torchao"]["tokens_per_s"]
    assert written["figures"] == {**speeds, "ours_vs_torchao": ratio, "recompiles": 0}


def rows_of_a_gpu(torchao):
    speeds = {"ours": 140, "bf16": 100, "torchao": torchao, "ours, 5%": 135, "ours, 10%": 125, "ours, gnmr": 145}
    return {
        side: {"tokens_per_s": speed, "recompiles": i, "host_syncs_per_step": 6 - i, "peak_gb": 30 + i}
        for i, (side, speed) in enumerate(speeds.items())
    }


def test_the_figures_of_a_gpu():
    assert gpu.summary(rows_of_a_gpu(torchao=150)) == pytest.approx(
        {
            "tokens_per_s_bf16": 100,
            "tokens_per_s_torchao": 150,
            "tokens_per_s_ours": 140,
            "ours_vs_torchao": 140 / 150,
            "recompiles": 5,
            "host_syncs_per_step": 6,
            "peak_memory_vs_torchao": 30 / 32,
            "speedup_kept_5": 0.7,
            "speedup_kept_10": 0.5,
        }
    )


def test_where_fp8_is_no_faster_there_is_no_speedup_to_keep():
    assert not {"speedup_kept_5", "speedup_kept_10"} & gpu.summary(rows_of_a_gpu(torchao=100)).keys()
