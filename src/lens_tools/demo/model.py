"""A character-level transformer, cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lens_core.errors import ConfigError, MissingExtraError

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["ModelShape", "PipelineStage", "sample_text"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The size of the whole model; the same on every rank.

    Attributes:
        symbols: Number of different characters.
        stages: Number of pipeline stages.
        layers: Transformer blocks in all stages together; where there are more stages, each stage
            has one.
        width: Size of a character's vector.
        heads: Attention heads of a block; divides ``width``.
        context: Characters that the model sees at once.
    """

    symbols: int
    stages: int
    layers: int = 4
    width: int = 64
    heads: int = 4
    context: int = 64

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ConfigError("stages", self.stages, "at least 1")
        if self.width % self.heads:
            raise ConfigError("heads", self.heads, f"a divisor of the width {self.width}")

    def layers_of(self, stage: int) -> int:
        """How many blocks one stage has."""
        layers = max(self.layers, self.stages)
        return layers * (stage + 1) // self.stages - layers * stage // self.stages


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class PipelineStage(nn.Module):
    """One stage: its share of the blocks; the first also embeds, the last also predicts.

    Args:
        shape: Size of the whole model.
        index: Which stage.
        seed: Of its parameters; the user's random stream is left as it was.
    """

    def __init__(self, shape: ModelShape, index: int, seed: int = 0) -> None:
        super().__init__()
        self.first = index == 0
        self.last = index == shape.stages - 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1_000_003 + index)
            if self.first:
                self.embed = nn.Embedding(shape.symbols, shape.width)
                self.position = nn.Parameter(0.02 * torch.randn(shape.context, shape.width))
            blocks = (_Block(shape.width, shape.heads) for _ in range(shape.layers_of(index)))
            self.blocks = nn.Sequential(*blocks)
            if self.last:
                self.norm = nn.LayerNorm(shape.width)
                self.head = nn.Linear(shape.width, shape.symbols)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Activations ``[batch, length, width]``; from the last stage logits of each symbol."""
        if self.first:
            x = self.embed(x) + self.position[: x.shape[1]]
        x = self.blocks(x)
        if self.last:
            x = self.head(self.norm(x))
        return x


def sample_text(
    stages: Sequence[nn.Module], prompt: torch.Tensor, length: int, context: int, seed: int = 0
) -> torch.Tensor:
    """A prompt, continued by the trained stages.

    Args:
        stages: All stages in order, in evaluation mode.
        prompt: ``int64[n]``, at least one character.
        length: How many characters to add.
        context: Characters that the model sees at once.
        seed: Of the private random source that draws.

    Returns:
        ``int64[n + length]``.
    """
    model = nn.Sequential(*stages)
    ids = prompt
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for _ in range(length):
            logits = model(ids[None, -context:])[0, -1]
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat((ids, drawn))
    return ids
