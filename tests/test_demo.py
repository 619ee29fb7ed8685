"""The demo's corpus, its fault and its arguments."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch

from examples.byte_gpt import ByteGPT, SourceCode, Windows
from examples.demo import DemoFault, FaultyBackend, arguments
from gnmr_lightning import GNMRCallback, GNMRConfig, GNMRPrecision, backends


def _text(folder: Path, files: int = 40) -> Path:
    for index in range(files):
        (folder / f"{index}.txt").write_text(f"file {index}\n" * 60)
    return folder


# -- the corpus --------------------------------------------------------------------------------------------------------


def test_the_standard_library_is_split_by_file_and_always_alike() -> None:
    first, second = SourceCode(max_mb=0.5), SourceCode(max_mb=0.5)
    first.setup()
    second.setup()
    assert not set(first.train_files) & set(first.val_files)
    assert (first.train_files, first.val_files) == (second.train_files, second.val_files)
    assert torch.equal(first.train_text, second.train_text)
    assert 300_000 < len(first.train_text) + len(first.val_text) <= 500_100  # and a newline between files
    assert all(name.endswith(".py") and "site-packages" not in name for name in first.train_files + first.val_files)


def test_a_file_keeps_its_side_when_others_come(tmp_path: Path) -> None:
    few = SourceCode(data=str(_text(tmp_path, 60)), seq_len=16)
    few.setup()
    _text(tmp_path, 90)
    many = SourceCode(data=str(tmp_path), seq_len=16)
    many.setup()
    assert set(few.train_files) <= set(many.train_files)
    assert set(few.val_files) <= set(many.val_files)
    assert few.val_files


def test_a_single_file_is_split_by_position(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(b"a" * 900 + b"b" * 100)
    data = SourceCode(data=str(tmp_path / "one.txt"), seq_len=16)
    data.setup()
    assert bytes(data.train_text.tolist()) == b"a" * 900
    assert bytes(data.val_text.tolist()) == b"b" * 100


def test_binary_and_hidden_files_are_not_text(tmp_path: Path) -> None:
    _text(tmp_path)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0" * 100)
    (tmp_path / ".hidden").write_text("x" * 1000)
    data = SourceCode(data=str(tmp_path), seq_len=16)
    data.setup()
    assert not {"picture.png", ".hidden"} & set(data.train_files + data.val_files)


@pytest.mark.parametrize("content", ["", "too little"])
def test_too_little_text_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    data = SourceCode(data=str(tmp_path), seq_len=128)
    with pytest.raises(ValueError, match=rf"holds {len(content)} bytes of text; windows of seq_len=128 need at least"):
        data.setup()


def test_a_missing_path_is_one_sentence(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(FileNotFoundError, match="data='nowhere' does not exist: give a text file or a folder"):
        SourceCode(data="nowhere")
    with pytest.raises(SystemExit):
        arguments(["--data", "nowhere"])
    assert "--data nowhere does not exist: give a text file or a folder of text files" in capsys.readouterr().err


def test_windows_are_repeatable_and_go_on_from_any_batch() -> None:
    text = torch.randint(256, (1000,), dtype=torch.uint8)
    whole = list(Windows(text, 3, 8, seed=0, batches=6))
    rest = list(Windows(text, 3, 8, seed=0, batches=2, first=lambda: 4))
    assert whole[0].shape == (3, 9)
    assert whole[0].dtype == torch.int64
    assert all(torch.equal(a, b) for a, b in zip(whole[4:], rest, strict=True))
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole[0], next(iter(Windows(text, 3, 8, seed=1))))


# -- the model ---------------------------------------------------------------------------------------------------------


def test_no_position_sees_what_follows() -> None:
    model = ByteGPT(n_layers=2, d_model=32, n_heads=2, seq_len=16).eval()
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


# -- the fault ---------------------------------------------------------------------------------------------------------


def test_the_fault_adds_noise_and_no_bias() -> None:
    torch.manual_seed(0)
    faulty = FaultyBackend(backends.resolve("int8"), inflation=1000)
    gradient = torch.randn(64, 256)
    rounded = torch.stack([faulty._round(gradient) for _ in range(400)])
    step = gradient.abs().max() * 1000 / 127
    assert set((rounded / step).round(decimals=3).unique().tolist()) == {-1.0, 0.0, 1.0}
    assert rounded.norm() > 3 * gradient.norm() * 400**0.5
    # 400 rounds leave noise of sqrt(|g| step / 400); the mean over all values of this shape is much nearer than that.
    assert ((rounded.mean(0) - gradient).mean() / step).abs() < 1e-3


def test_the_sick_unit_alone_gets_the_faulty_backend_and_the_healthy_one_back(tmp_path: Path) -> None:
    seen: list[tuple[int, set[str]]] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: object) -> None:
            units = trainer.precision_plugin.units  # type: ignore[attr-defined]
            sick = {u.name for u in units for linear in u.linears.values() if linear.backend != "int8"}
            seen.append((trainer.global_step - 1, sick))

    watch = GNMRCallback()
    policy = GNMRConfig(warmup_steps=3, lock_interval=4, max_o=2)
    fault = DemoFault("blocks.1.mlp.up", start=5, steps=3, inflation=3000)
    trainer = L.Trainer(
        accelerator="cpu",
        plugins=[GNMRPrecision("int8", control=policy)],
        callbacks=[watch, fault, Look()],
        max_steps=12,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    L.seed_everything(0)
    model = ByteGPT(n_layers=2, d_model=32, n_heads=2, seq_len=16)
    trainer.fit(model, SourceCode(data=str(_text(tmp_path)), batch_size=2, seq_len=16))
    assert seen == [(step, {"blocks.1.mlp.up"} if 5 <= step < 8 else set()) for step in range(12)]
    assert (fault.began, fault.ended) == (5, 8)
    events = [(e.step, e.kind) for e in watch.events if e.unit == "blocks.1.mlp.up"]
    assert events[:2] == [(5, "locked"), (9, "released")]


def test_an_unknown_unit_is_named() -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        plugins=[GNMRPrecision("int8")],
        callbacks=[DemoFault("blocks.9.up")],
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(
        ValueError, match=r"unit='blocks\.9\.up' is not in the model: write one of blocks\.0\.attn\.qkv"
    ):
        trainer.fit(ByteGPT(n_layers=2, d_model=32, n_heads=2), SourceCode(max_mb=0.1))


def test_the_demos_arguments_are_the_clis(tmp_path: Path) -> None:
    assert arguments([]) == ["fit", "--config", "configs/demo.yaml"]
    assert arguments(["--no-fault", "--data", str(tmp_path), "--trainer.max_steps=5"])[3:] == [
        f"--data.data={tmp_path}",
        "--trainer.callbacks.steps=0",
        "--trainer.max_steps=5",
    ]
