"""Fine-tunes a causal LM in 8 bits with recovery: one command, full or LoRA, on one device or sharded with FSDP2.

    python -m examples.finetune --model FOLDER_OR_HUB_ID --data texts.jsonl --lora 8
    python -m examples.finetune                 # offline: a small byte Llama, pretrained first, on docstrings

The first form stands for `python -m gnmr_lightning fit --config configs/finetune.yaml --model.source=... ...`; every
further argument goes to that command as it is, so all of Lightning can be set. `configs/llama2_13b_fsdp2.yaml` has the
same parts for Llama-2 13B on a machine with GPUs.

With ModelParallelStrategy the model is built without memory on every rank, sharded block by block, and filled from
the weights that rank 0 alone has read: no process but that one ever holds a whole model, and no GPU does.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from examples.byte_llama import QUICK, pretrained_byte_model
from examples.causal_lm import CausalLM, quiet_torchao
from examples.common import recovery, run, say

CONFIG = Path(__file__).parent.parent / "configs" / "finetune.yaml"
CHECKPOINT = "runs/finetune/last.ckpt"


class FineTune(CausalLM):
    """A pretrained causal LM, loaded when the Trainer has set up its devices, whole or with LoRA adapters.

    Args:
        source: hub id or local folder of the model and of its tokenizer.
        lora_rank: rank of the LoRA adapters, which alone are trained then; 0 trains all weights.
        lora_alpha: PEFT's scale: adapters are multiplied by lora_alpha / lora_rank. None for twice the rank.
        lora_targets: names of the linear layers that get adapters; None for all but the output head.
        lr: AdamW's learning rate after warm-up.
        weight_decay: of the parameters with two or more dimensions; the others have none.
        warmup: optimizer steps in which the learning rate rises linearly; constant from there on.
        gradient_checkpointing: recompute each block in backward instead of keeping its activations.
    """

    def __init__(
        self,
        source: str,
        lora_rank: int = 0,
        lora_alpha: int | None = None,
        lora_targets: list[str] | None = None,
        lr: float = 1e-4,
        weight_decay: float = 0.0,
        warmup: int = 20,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__(None, lr, weight_decay, warmup, gradient_checkpointing)
        if lora_rank < 0:
            raise ValueError(f"lora_rank={lora_rank} is no rank: write 0 for none, or 1 or more")
        self.source = source
        self.lora_rank, self.lora_alpha, self.lora_targets = lora_rank, lora_alpha, lora_targets

    def configure_model(self) -> None:
        if self.model is None:
            quiet_torchao()
            sharded = isinstance(self.trainer.strategy, ModelParallelStrategy)
            self.take(self._sharded() if sharded else self._whole())

    def _whole(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        return self._adapted(AutoModelForCausalLM.from_pretrained(self.source, dtype=torch.get_default_dtype()))

    def _adapted(self, model: nn.Module) -> nn.Module:
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise ValueError(
                f"{type(model).__name__} takes no position_ids, which tell packed documents apart: take a model that "
                "does, as Llama, Qwen, Mistral and GPT-NeoX do"
            )
        if not self.lora_rank:
            return model
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=self.lora_rank,
            lora_alpha=2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha,
            target_modules=self.lora_targets or "all-linear",
        )
        return get_peft_model(model, config)

    def _sharded(self) -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        assert self.device_mesh is not None  # ModelParallelStrategy makes one
        device, mesh = self.trainer.strategy.root_device, self.device_mesh["data_parallel"]
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(self.source)
            bare = AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype())
            model: Any = self._adapted(bare)
        # Weights travel in bf16 and gradients are added up in fp32; the optimizer has the weights' own dtype.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in [m for m in model.modules() if type(m).__name__ in bare._no_split_modules]:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model.to_empty(device=device)

        whole = None
        if self.trainer.is_global_zero:
            with torch.device("cpu"):
                whole = self._whole()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole.state_dict() if whole is not None else {}, options=options)
        # Rotary frequencies and the like, which no state dict holds.
        read = dict(whole.named_buffers()) if whole is not None else {}
        for name, buffer in model.named_buffers():
            if name in read:
                buffer.copy_(read[name])
            dist.broadcast(buffer, 0)
        return model


class Perplexity(L.Callback):
    """Says the validation's perplexity before, during and after; at the end writes `summary.json` and the model.

    Perplexity is exp of the mean loss per predicted token: of a byte, with a byte model. The model's folder, `model`,
    is one for `from_pretrained`, with the tokenizer; after LoRA it holds the adapters, for PEFT.

    Args:
        out: folder of both.

    Raises:
        ValueError: in `setup`: the model that is tuned lies where the tuned one is to go.
    """

    def __init__(self, out: str = "runs/finetune") -> None:
        self.out = Path(out)
        self.seen: dict[int, float] = {}
        """Perplexity by optimizer steps done."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = dict(state_dict["seen"])

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        source = getattr(pl_module, "source", None)
        if source is not None and Path(source).resolve() == self._folder.resolve():
            raise ValueError(f"the model {source} is where this run's would go: move it away, or set another `out`")

    @property
    def _folder(self) -> Path:
        return self.out / "model"

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loss = trainer.callback_metrics.get("val_loss")
        if loss is None:
            return
        # exp of a loss of 700 and more is no float; such a model knows nothing anyway.
        perplexity = self.seen[trainer.global_step] = math.exp(min(loss.item(), 700.0))
        say(trainer, f"step {trainer.global_step}: validation perplexity {perplexity:.4g}")
        for logger in trainer.loggers:
            logger.log_metrics({"val_perplexity": perplexity}, step=trainer.global_step)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, FineTune)
        # All ranks together, since a shard is on each.
        weights = get_model_state_dict(
            pl_module.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if not trainer.is_global_zero:
            return
        from transformers import AutoTokenizer

        folder = self._folder
        # An earlier run's adapters would be loaded with this one's model, or the other way round.
        for stale in [*folder.glob("adapter_*"), *folder.glob("*.safetensors*"), folder / "config.json"]:
            stale.unlink(missing_ok=True)
        pl_module.model.save_pretrained(folder, state_dict=weights)
        AutoTokenizer.from_pretrained(pl_module.source).save_pretrained(folder)
        summary = {"source": pl_module.source, "steps": trainer.global_step, **recovery(trainer)}
        summary["perplexity"] = self.seen
        path = self.out / "summary.json"
        text = json.dumps(summary, indent=2) + "\n"
        path.write_text(text, encoding="utf-8")
        print(f"{text}Model: {folder}, figures: {path}")


def arguments(given: Sequence[str]) -> list[str]:
    """The arguments of `python -m gnmr_lightning` that `given` stands for; pretrains a model if none is named."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.finetune",
        description="Fine-tunes a causal LM with GNMRPrecision.",
        epilog="Further arguments go to `python -m gnmr_lightning fit`, for instance --trainer.max_steps=1000, "
        "--model.lr=1e-5, --data.seq_len=512 or --trainer.plugins.control.error_threshold=4.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="ID|FOLDER", help="of transformers; default: a small byte model, made once")
    parser.add_argument("--data", metavar="PATH", help=".jsonl, text or a folder; default: docstrings of dependencies")
    parser.add_argument("--lora", metavar="RANK", type=int, default=0, help="train adapters of this rank alone")
    parser.add_argument("--recipe", help="any recipe of GNMRPrecision, or bf16 for a run without 8 bits")
    parser.add_argument("--no-gnmr", action="store_true", help="8 bits without recovery")
    parser.add_argument("--resume", action="store_true", help=f"go on from {CHECKPOINT}")
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model, to see that all works")
    own, further = parser.parse_known_args(given)
    if own.data is not None and not Path(own.data).exists():
        parser.error(f"--data {own.data} does not exist: give a .jsonl file, a text file or a folder")
    if own.recipe == "bf16" and own.no_gnmr:
        parser.error("--recipe bf16 has nothing to recover from: leave --no-gnmr out")
    if own.resume and not Path(CHECKPOINT).exists():
        parser.error(f"--resume finds no {CHECKPOINT} here: start without it, or give --ckpt_path=FILE")
    source = own.model if own.model is not None else str(pretrained_byte_model(QUICK if own.quick else None))
    result = ["fit", "--config", str(CONFIG), f"--model.source={source}"]
    if own.quick:
        result += ["--trainer.max_steps=10", "--trainer.limit_train_batches=5", "--data.per_package=20"]
    if own.data is not None:
        result.append(f"--data.data={own.data}")
    if own.lora:
        result.append(f"--model.lora_rank={own.lora}")
    if own.recipe == "bf16":
        result += ["--trainer.plugins=null", "--trainer.precision=bf16-mixed"]
    elif own.recipe is not None:
        result.append(f"--trainer.plugins.recipe={own.recipe}")
    if own.no_gnmr:
        # A controller that only looks on, with the method that measures nothing in the layers.
        result += ["--trainer.plugins.control.method=gnmr", "--trainer.plugins.control.warmup_steps=1000000000"]
    if own.resume:
        result.append(f"--ckpt_path={CHECKPOINT}")
    return [*result, *further]


def main(given: Sequence[str] | None = None) -> None:
    """Fine-tunes as `given` says, the process's own arguments by default."""
    run(arguments, given)


if __name__ == "__main__":
    main()
