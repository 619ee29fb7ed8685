"""The command line: its own subcommand, overrides, and a short training run that is resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gnmr_lightning import GNMRConfig, GNMRPrecision
from gnmr_lightning.__main__ import UnitsTrainer, main

ROOT = Path(__file__).parent.parent
DEMO = ["--config", "configs/demo.yaml"]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(sys, "argv", list(sys.argv))  # `main` writes its arguments there


def test_units_prints_a_line_for_each_linear_of_the_demo(capsys: pytest.CaptureFixture) -> None:
    main(["units", *DEMO, "--trainer.plugins.recipe=int8"])
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["UNIT", "LAYER", "SHAPE", "RECIPE"]
    assert len(rows) == 17
    assert rows[0].split() == ["blocks.0.attn.qkv", "blocks.0.attn.qkv", "384x128", "int8"]
    assert rows[3].split() == ["blocks.0.mlp.down", "blocks.0.mlp.down", "128x512", "int8"]
    assert rows[-1].split(maxsplit=3) == ["-", "head", "256x128", "skipped: the output head"]


def test_overrides_reach_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[GNMRPrecision] = []
    monkeypatch.setattr(UnitsTrainer, "units", lambda self, model, datamodule=None: seen.append(self.precision_plugin))
    main(["units", *DEMO, "--trainer.plugins.recipe=float8_rowwise", "--trainer.plugins.control.lock_interval=20"])
    (plugin,) = seen
    assert plugin.backend.name == "float8_rowwise"
    # What the config says of the policy stays, but for the one field.
    assert plugin.control == GNMRConfig(lock_interval=20, max_o=2)


def test_a_single_mapping_is_a_plugin_too(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = tmp_path / "one.yaml"
    config.write_text(
        "trainer: {logger: false, plugins: {class_path: gnmr_lightning.GNMRPrecision, init_args: {recipe: int8}}}\n"
        "model: {class_path: examples.byte_gpt.ByteGPT, init_args: {n_layers: 2, d_model: 32}}\n"
    )
    main(["units", "--config", str(config), "--trainer.plugins.granularity=block"])
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["blocks.0"] * 4 + ["blocks.1"] * 4 + ["-"]


def test_recipes_by_pattern_come_from_yaml(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = tmp_path / "patterns.yaml"
    config.write_text(
        "trainer: {logger: false, plugins: {class_path: gnmr_lightning.GNMRPrecision, init_args: {recipe: {\n"
        "  '*.mlp.*': float8_rowwise, '*.qkv': 'fake(a=8, w=4)'}}}}\n"
        "model: {class_path: examples.byte_gpt.ByteGPT, init_args: {n_layers: 1, d_model: 32}}\n"
    )
    main(["units", "--config", str(config)])
    rows = [row.split(maxsplit=3) for row in capsys.readouterr().out.splitlines()[1:]]
    assert {row[1]: row[3] for row in rows} == {
        "blocks.0.attn.qkv": "fake(a=8, w=4)",
        "blocks.0.attn.proj": "skipped: matches no recipe's pattern",
        "blocks.0.mlp.up": "float8_rowwise",
        "blocks.0.mlp.down": "float8_rowwise",
        "head": "skipped: matches no recipe's pattern",
    }
    main(["units", "--config", str(config), "--trainer.plugins.recipe=int8", "--trainer.plugins.skip_small=false"])
    assert [row.split(maxsplit=3)[3] for row in capsys.readouterr().out.splitlines()[1:5]] == ["int8"] * 4


def test_units_needs_the_plugin(tmp_path: Path) -> None:
    config = tmp_path / "plain.yaml"
    config.write_text("trainer: {logger: false}\nmodel: {class_path: examples.byte_gpt.ByteGPT}\n")
    with pytest.raises(SystemExit, match=r"trains with Precision, which has no units: add gnmr_lightning\.GNMRPrec"):
        main(["units", "--config", str(config)])


def test_a_policy_out_of_range_is_refused_with_its_sentence() -> None:
    with pytest.raises(ValueError, match=r"threshold=0\.5 is out of range: write a number above 1"):
        main(["units", *DEMO, "--trainer.plugins.control.threshold=0.5"])


def test_a_missing_jsonargparse_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install 'gnmr_lightning\[cli\]'"):
        main(["units", *DEMO])


def _small(out: Path, **values: object) -> list[str]:
    """Arguments that make the demo's run small, with all that it writes below `out`."""
    config = out / "small.yaml"
    config.write_text(
        f"""
seed_everything: 1
trainer:
  accelerator: cpu
  default_root_dir: {out}
  limit_train_batches: 4
  enable_progress_bar: false
  enable_model_summary: false
  num_sanity_val_steps: 0
  logger: false
  plugins:
    - class_path: gnmr_lightning.GNMRPrecision
      init_args: {{recipe: int8, control: {{warmup_steps: 2, lock_interval: 3, max_o: 1}}}}
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{dirpath: {out}, filename: demo, enable_version_counter: false, save_on_train_epoch_end: true}}
    - class_path: examples.demo.DemoReport
      init_args: {{out: {out}}}
    - class_path: examples.demo.DemoFault
      init_args: {{unit: blocks.1.mlp.up, start: 4, steps: 2, inflation: 3000}}
model:
  class_path: examples.byte_gpt.ByteGPT
  init_args: {{n_layers: 2, d_model: 32, n_heads: 2, seq_len: 16}}
data:
  class_path: examples.byte_gpt.SourceCode
  init_args: {{data: {ROOT / "gnmr_lightning"}, batch_size: 2, seq_len: 16, val_batches: 2}}
"""
    )
    return ["--config", str(config), *(f"--trainer.{name}={value}" for name, value in values.items())]


def test_fit_writes_the_summary_and_a_checkpoint_that_resumes(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "gnmr_lightning", "fit", *_small(tmp_path, max_steps=6)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "Failed to load" not in run.stdout + run.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {"steps", "train_loss", "val_loss", "bf16_share", "interventions", "max_o", "recipe"} <= set(summary)
    assert (summary["steps"], summary["max_o"], summary["recipe"]) == (6, 1, "int8")
    assert 4.5 < summary["train_loss"] < 6.5  # ln 256 is 5.55
    assert summary["fault"]["unit"] == "blocks.1.mlp.up"
    assert summary["fault"]["began"] == 4
    checkpoint = torch.load(tmp_path / "demo.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 6
    assert "GNMRPrecision" in checkpoint

    main(["fit", *_small(tmp_path, max_steps=9), f"--ckpt_path={tmp_path / 'demo.ckpt'}"])
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 9
    assert torch.load(tmp_path / "demo.ckpt", weights_only=True)["global_step"] == 9
