"""GNMRPrecision in a script of one's own: one argument of the Trainer, and nothing else changes.

Run it from the repository's root: `python -m examples.train_plain_lightning`.
"""

from lightning import Trainer, seed_everything

from examples.byte_gpt import ByteGPT, SourceCode
from gnmr_lightning import GNMRPrecision


def main(max_steps: int = 100) -> Trainer:
    """Trains a small byte-level GPT for `max_steps` optimizer steps."""
    seed_everything(1)
    trainer = Trainer(
        plugins=[GNMRPrecision()],
        max_steps=max_steps,
        limit_train_batches=max_steps,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(ByteGPT(n_layers=2, seq_len=64), datamodule=SourceCode(batch_size=4, seq_len=64))
    return trainer


if __name__ == "__main__":
    main()
