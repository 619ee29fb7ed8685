"""The command line: `python -m gnmr_lightning fit|validate|test|predict|units --config FILE ...`.

It is LightningCLI as it stands, with one more subcommand. `units` builds what the config describes and prints how
GNMRPrecision would cut the model, one line for each linear layer; it reads no data and trains nothing.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence

import lightning.pytorch as pl
from torch import nn

from .linear import RecoverableLinear
from .precision import GNMRPrecision


class UnitsTrainer(pl.Trainer):
    """Lightning's Trainer with an entry point that trains nothing; LightningCLI finds a subcommand's method by name."""

    def units(self, model: pl.LightningModule, datamodule: pl.LightningDataModule | None = None) -> None:
        """Prints each linear layer's unit, name, shape (out x in), and recipe or the reason why it is skipped.

        Args:
            model: the model; its `configure_model` is called as the Trainer would.
            datamodule: not used; LightningCLI gives it to every subcommand of a config with data.
        """
        plugin = self.precision_plugin
        if not isinstance(plugin, GNMRPrecision):
            raise SystemExit(
                f"the config trains with {type(plugin).__name__}, which has no units: "
                "add gnmr_lightning.GNMRPrecision to trainer.plugins"
            )
        model.trainer = self
        with plugin.module_init_context():
            model.configure_model()
        logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)  # the table says it all
        plugin.convert_module(model)
        for line in _table(model, plugin):
            print(line)
        plugin.teardown()


def _table(model: nn.Module, plugin: GNMRPrecision) -> list[str]:
    """The lines of `units`, in the order in which the model registers its layers."""
    unit_of = {fqn: unit.name for unit in plugin.units for fqn in unit.fqns}
    reasons = {skipped.fqn: skipped.reason for skipped in plugin.skipped}
    rows = [("UNIT", "LAYER", "SHAPE", "RECIPE")]
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear):
            recipe = module.backend if isinstance(module, RecoverableLinear) else f"skipped: {reasons[fqn]}"
            rows.append((unit_of.get(fqn, "-"), fqn, f"{module.out_features}x{module.in_features}", recipe))
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:3]]
    return ["  ".join([*(cell.ljust(w) for cell, w in zip(row[:3], widths, strict=True)), row[3]]) for row in rows]


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line on `args`, the process's own ones by default."""
    if importlib.util.find_spec("jsonargparse") is None:
        raise SystemExit("the command line needs jsonargparse: pip install 'gnmr_lightning[cli]'")
    from lightning.pytorch.cli import LightningCLI

    class CLI(LightningCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {**LightningCLI.subcommands(), "units": {"model", "datamodule"}}

    if args is not None:
        sys.argv[1:] = args  # LightningCLI's own `args` warns about the arguments of the process
    # A second run into the same folder replaces the first one's config, as it does its other files.
    CLI(trainer_class=UnitsTrainer, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
