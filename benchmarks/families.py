"""One small model of each family that people train: what the support matrix is measured on.

Each is as awkward as its kind is in real life: batches of 12 samples and a last one of 7, sequences of 5 (so that
batch * sequence is no multiple of 16), layers that are called twice, never, without a gradient, or with no rows at all.
A family that cannot be built here, for want of a package, is not in `FAMILIES`.

Legend: B = samples of a batch, T = positions, D = width, P = patches of an image, E = experts.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from examples.byte_gpt import VOCABULARY, Block

CLASSES = 4
_HEADS = 2
_T = 5
_SAMPLES, _BATCH = 31, 12


class Family(pl.LightningModule):
    """A model with a loss; `net` is what `torch.compile` is given.

    Args:
        d: the width D.
    """

    net: Any

    def loss(self, batch: list[Tensor]) -> Tensor:
        """The loss of a batch."""
        x, y = batch
        return F.cross_entropy(self.net(x).float(), y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Optimizer | list[Optimizer]:
        return AdamW(self.parameters(), 3e-3)

    @staticmethod
    def data(d: int) -> DataLoader:
        """Batches of x (B, T, D) with a class each that can be read off it; the last batch is of 7."""
        x_BTD = torch.randn(_SAMPLES, _T, d, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x_BTD, x_BTD[:, 0, :CLASSES].argmax(1)), _BATCH)

    def compile_parts(self, backend: str) -> None:
        """Compiles the model as its user would."""
        self.net.compile(backend=backend)


class _Tokens(Family):
    """A language model over tokens (B, T)."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens_BT,) = batch
        return F.cross_entropy(self.net(tokens_BT[:, :-1]).flatten(0, 1).float(), tokens_BT[:, 1:].flatten())

    @staticmethod
    def data(d: int) -> DataLoader:
        """Batches of tokens (B, T + 1) that count upwards."""
        first = torch.arange(_SAMPLES)[:, None]
        return DataLoader(TensorDataset((first + torch.arange(_T + 1)) % VOCABULARY), _BATCH)


class _DecoderNet(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, d)
        self.blocks = nn.ModuleList([Block(d, _HEADS)])
        self.head = nn.Linear(d, VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD)


class Decoder(_Tokens):
    """A GPT-style decoder."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.net = _DecoderNet(d)


class _LlamaNet(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=d,
                intermediate_size=2 * d,
                num_hidden_layers=1,
                num_attention_heads=_HEADS,
                num_key_value_heads=_HEADS,
                max_position_embeddings=16,
                tie_word_embeddings=True,
            )
        )

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.model(input_ids=tokens_BT, use_cache=False).logits


class Llama(_Tokens):
    """Llama of Hugging Face transformers, with tied embeddings."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.net = _LlamaNet(d)


class _ViTBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x_BPD: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x_BPD)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        x_BPD = x_BPD + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x_BPD + self.mlp(self.norm2(x_BPD))


class _ViTNet(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, d, kernel_size=4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, d) * 0.02)
        self.blocks = nn.ModuleList([_ViTBlock(d)])
        self.head = nn.Linear(d, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x_BPD = self.patches(image).flatten(2).transpose(1, 2)
        x_BPD = torch.cat([self.cls.expand(len(x_BPD), -1, -1).to(x_BPD.dtype), x_BPD], dim=1)
        for block in self.blocks:
            x_BPD = block(x_BPD)
        return self.head(x_BPD[:, 0])


class _Images(Family):
    @staticmethod
    def data(d: int) -> DataLoader:
        """Batches of images (B, 1, 8, 8), one of whose quarters is bright, and which quarter it is."""
        y = torch.arange(_SAMPLES) % CLASSES
        image = torch.randn(_SAMPLES, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        quarter = F.one_hot(y, CLASSES).view(-1, 1, 2, 2).float()
        return DataLoader(TensorDataset(image + F.interpolate(quarter, scale_factor=4.0), y), _BATCH)


class ViT(_Images):
    """A vision transformer: patches by convolution, a class token, so an odd number of positions."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.net = _ViTNet(d)


class _MixerNet(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, d, kernel_size=4, stride=2)  # overlapping, so 9 of them
        self.tokens = nn.Sequential(nn.Linear(9, 16), nn.GELU(), nn.Linear(16, 9))
        self.channels = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.head = nn.Linear(d, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x_BDP = self.patches(image).flatten(2)
        x_BDP = x_BDP + self.tokens(x_BDP)
        x_BDP = x_BDP + self.channels(x_BDP.transpose(1, 2)).transpose(1, 2)
        return self.head(x_BDP.mean(2))


class Mixer(_Images):
    """MLP-Mixer: layers over 9 patches, which no 8-bit kernel's alignment suits, and transposed input."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.net = _MixerNet(d)


class _EncoderNet(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(d, _HEADS, 2 * d, dropout=0.0, batch_first=True)
        # Nested tensors fail under CPU autocast in torch 2.13 itself: "expected scalar type Float but found BFloat16".
        self.encoder = nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False)
        self.head = nn.Linear(d, CLASSES)

    def forward(self, x_BTD: Tensor) -> Tensor:
        is_padding_BT = torch.arange(_T, device=x_BTD.device).expand(len(x_BTD), -1) >= _T - 1
        return self.head(self.encoder(x_BTD, src_key_padding_mask=is_padding_BT)[:, 0])


class Encoder(Family):
    """nn.TransformerEncoder with padding: in eval its fast path calls none of its layers."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.net = _EncoderNet(d)


class _SharedNet(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.cell, self.mix = nn.Linear(d, d), nn.Linear(d, d)
        self.unused = nn.Linear(d, d)
        self.head = nn.Linear(d, CLASSES)

    def forward(self, x_BTD: Tensor) -> Tensor:
        state_BD = self.mix(x_BTD[:, 0])
        for position in range(1, x_BTD.shape[1]):
            state_BD = state_BD + torch.tanh(self.cell(state_BD + self.mix(x_BTD[:, position])))
        return self.head(state_BD)


class Shared(Family):
    """A recurrent cell: two layers that are called at every position, and one that is never called."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.net = _SharedNet(d)


class _ExpertsNet(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.router = nn.Linear(d, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(3)
        )
        self.head = nn.Linear(d, CLASSES)
        # The last expert is chosen for next to no token: its calls have few rows or none.
        nn.init.zeros_(self.router.weight[2:])
        nn.init.constant_(self.router.bias[2:], -1.0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_MD = x_BTD.flatten(0, 1)
        gates_ME = self.router(x_MD).softmax(-1)
        chosen_M = gates_ME.argmax(-1)
        y_MD = x_MD.clone()
        for index, expert in enumerate(self.experts):
            rows = (chosen_M == index).nonzero().flatten()
            gate = gates_ME[rows, index, None]
            y_MD = y_MD.index_add(0, rows, (gate * expert(x_MD[rows])).to(y_MD.dtype))
        return self.head(y_MD.view_as(x_BTD)[:, 0])


class Experts(Family):
    """A mixture of experts: ragged numbers of rows, and calls without any."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.net = _ExpertsNet(d)


class _MLP(nn.Module):
    # A class of its own: dynamo compiles no nn.Sequential that is the whole of what it is given.
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n) for k, n in itertools.pairwise(sizes))

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x_BD = F.leaky_relu(layer(x_BD), 0.2)
        return self.layers[-1](x_BD)


class GAN(Family):
    """Manual optimization of two optimizers, one model run under the other's no_grad, spectral normalisation."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.ModuleDict({"generator": _MLP(d, d, d), "critic": _MLP(d, d, d, 1)})
        nn.utils.parametrizations.spectral_norm(self.net["critic"].layers[1])

    def loss(self, batch: list[Tensor]) -> Tensor:
        """The critic's loss; no gradient reaches the generator."""
        real = batch[0][:, 0]
        with torch.no_grad():
            fake = self.net["generator"](real.flip(1))
        scores = self.net["critic"](torch.cat([real, fake.to(real.dtype)])).float()
        return F.softplus(torch.cat([-scores[: len(real)], scores[len(real) :]])).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizers: Any = self.optimizers()
        of_critic, of_generator = optimizers
        loss = self.loss(batch)
        of_critic.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_critic, gradient_clip_val=1.0)
        of_critic.step()
        if batch_idx % 2:  # the generator steps half as often, and not in the first batch
            self.toggle_optimizer(of_generator)
            fooled = F.softplus(-self.net["critic"](self.net["generator"](batch[0][:, 0].flip(1))).float()).mean()
            of_generator.zero_grad()
            self.manual_backward(fooled)
            of_generator.step()
            self.untoggle_optimizer(of_generator)
        return loss.detach()

    def configure_optimizers(self) -> list[Optimizer]:
        return [AdamW(self.net["critic"].parameters(), 3e-3), AdamW(self.net["generator"].parameters(), 3e-3)]

    def compile_parts(self, backend: str) -> None:
        for part in self.net.values():
            part.compile(backend=backend)


class _TeacherNet(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, d))
        self.teacher = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, d)).requires_grad_(False)
        self.head = nn.Linear(d, d)
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, x_BTD: Tensor) -> Tensor:
        with torch.no_grad():
            target_BTD = self.teacher(x_BTD)
        return 1 - F.cosine_similarity(self.head(self.student(x_BTD.flip(1))), target_BTD, dim=-1)


class Teacher(Family):
    """Self-distillation: a frozen teacher under no_grad, moved towards the student after each step."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.net = _TeacherNet(d)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.net(batch[0]).float().mean()

    def on_train_batch_end(self, *args: object) -> None:
        with torch.no_grad():
            for target, source in zip(self.net.teacher.parameters(), self.net.student.parameters(), strict=True):
                target.lerp_(source, 0.05)


FAMILIES: dict[str, Callable[[int], Family]] = {
    "GPT decoder": Decoder,
    "Llama (transformers)": Llama,
    "ViT": ViT,
    "MLP-Mixer": Mixer,
    "nn.TransformerEncoder": Encoder,
    "recurrent cell": Shared,
    "mixture of experts": Experts,
    "GAN": GAN,
    "teacher and student": Teacher,
}
"""By name, what builds a model of width d."""

if importlib.util.find_spec("transformers") is None:
    del FAMILIES["Llama (transformers)"]
