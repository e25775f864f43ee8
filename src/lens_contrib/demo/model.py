"""A character-level transformer, cut into pipeline stages, and the text that it learns."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lens_core.errors import ConfigError, MissingExtraError

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["StageModel", "Text", "TrainingConfig", "sample_text"]

State = Mapping[str, torch.Tensor]

_DATA_SEED: Final = 0x5EED


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """The model, its data and its schedule; the same on every rank.

    Attributes:
        text_path: File to learn; empty for the documentation topics that ship inside CPython.
        layers: Transformer blocks in all stages together; at least one a stage.
        width: Size of a token's vector.
        heads: Attention heads of a block.
        context: Characters that the model sees at once.
        microbatches: Microbatches of a step.
        microbatch_size: Sequences of a microbatch.
        learning_rate: Of AdamW.
        seed: Of the parameters and of the order of the data.
    """

    text_path: str = ""
    layers: int = 4
    width: int = 64
    heads: int = 4
    context: int = 64
    microbatches: int = 4
    microbatch_size: int = 8
    learning_rate: float = 3e-3
    seed: int = 0

    def layers_of(self, rank: int, world_size: int) -> range:
        """The blocks of one stage.

        Raises:
            ConfigError: If there are fewer blocks than stages.
        """
        if self.layers < world_size:
            raise ConfigError("layers", self.layers, f"at least {world_size}, one for each stage")
        return range(self.layers * rank // world_size, self.layers * (rank + 1) // world_size)


class Text:
    """A text as numbers, and its batches: the same on every rank, with nothing sent for it."""

    def __init__(self, config: TrainingConfig) -> None:
        if config.text_path:
            content = Path(config.text_path).read_text(encoding="utf-8", errors="replace")
        else:
            content = "\n\n".join(pydoc_data.topics.topics.values())
        if len(content) <= config.context + 1:
            raise ConfigError(
                "text_path",
                config.text_path,
                f"a text of more than {config.context + 1} characters",
            )
        self.characters: Final = "".join(sorted(set(content)))
        index = {character: number for number, character in enumerate(self.characters)}
        self._numbers = torch.tensor([index[character] for character in content])
        self._config = config

    def microbatches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A step's inputs and targets, ``int64[microbatch_size, context]`` each."""
        config = self._config
        # A generator of its own: the user's random stream is nobody else's.
        generator = torch.Generator().manual_seed((config.seed << 32) ^ (step << 8) ^ _DATA_SEED)
        batches = []
        for _ in range(config.microbatches):
            starts = torch.randint(
                len(self._numbers) - config.context - 1,
                (config.microbatch_size, 1),
                generator=generator,
            )
            window = self._numbers[starts + torch.arange(config.context + 1)]
            batches.append((window[:, :-1], window[:, 1:].contiguous()))
        return batches


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


class StageModel(nn.Module):
    """One stage: its share of the blocks; the first embeds, the last predicts."""

    def __init__(self, rank: int, world_size: int, config: TrainingConfig, characters: str) -> None:
        super().__init__()
        self.first, self.last = rank == 0, rank == world_size - 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed * 1_000_003 + rank)
            if self.first:
                self.embed = nn.Embedding(len(characters), config.width)
                self.position = nn.Parameter(0.02 * torch.randn(config.context, config.width))
            self.blocks = nn.Sequential(
                *(_Block(config.width, config.heads) for _ in config.layers_of(rank, world_size))
            )
            if self.last:
                self.norm = nn.LayerNorm(config.width)
                self.head = nn.Linear(config.width, len(characters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Activations, or the logits from the last stage."""
        if self.first:
            x = self.embed(x) + self.position[: x.shape[1]]
        x = self.blocks(x)
        if self.last:
            x = self.head(self.norm(x))
        return x


def sample_text(
    config: TrainingConfig,
    states: Sequence[State],
    *,
    characters: str,
    length: int = 200,
    prompt: str = "\n",
    seed: int = 0,
) -> str:
    """Text that the trained stages write.

    Args:
        config: The configuration they were trained with.
        states: ``state_dict`` of every stage, in order.
        characters: :attr:`Text.characters` of the text they were trained on.
        length: Number of characters to write.
        prompt: What to continue; characters that the text does not have are left out.
        seed: Of the private random source that draws.
    """
    stages = []
    for rank, state in enumerate(states):
        stage = StageModel(rank, len(states), config, characters)
        stage.load_state_dict(dict(state))
        stages.append(stage.eval())
    model = nn.Sequential(*stages)
    numbers = [characters.index(c) for c in prompt if c in characters] or [0]
    start = len(numbers)
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for _ in range(length):
            logits = model(torch.tensor([numbers[-config.context :]]))[0, -1]
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            numbers.append(int(drawn))
    return "".join(characters[number] for number in numbers[start:])
