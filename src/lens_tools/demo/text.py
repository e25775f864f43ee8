"""The text that the demo trains on: real prose, as characters."""

from __future__ import annotations

import pydoc_data.topics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lens_core.errors import LensError, MissingExtraError

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["Corpus", "TextError", "load_corpus"]

#: Characters with ids of their own; the rest share one.
_MAX_CHARACTERS: Final = 127
#: What is read of a text: a process holds it as one number a character, and there are several.
_MOST_CHARACTERS: Final = 4_000_000
_UNKNOWN: Final = "\N{REPLACEMENT CHARACTER}"


class TextError(LensError, ValueError):
    """A text that nothing can be trained on."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as character ids.

    Attributes:
        characters: Id to character; the last stands for every rarer one.
        ids: ``int64[length]``, the text.
        source: Where the text is from, for a person.
    """

    characters: str
    ids: torch.Tensor
    source: str

    def batch(self, size: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each ``int64[size, length]``: the same on every rank for a seed."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.ids) - length - 1, (size,), generator=generator)
        index = starts[:, None] + torch.arange(length)
        return self.ids[index], self.ids[index + 1]

    def encode(self, text: str) -> torch.Tensor:
        """Ids of a text, ``int64[length]``."""
        known = {character: number for number, character in enumerate(self.characters)}
        unknown = len(self.characters) - 1
        return torch.tensor([known.get(character, unknown) for character in text])

    def decode(self, ids: torch.Tensor) -> str:
        """The text of ids."""
        return "".join(self.characters[int(number)] for number in ids)


def load_corpus(path: str | Path | None = None, *, at_least: int = 4096) -> Corpus:
    """The text of a file, or the documentation topics that ship with CPython (about 700 KB).

    Args:
        path: A UTF-8 text file; what is behind its 4,000,000th character is not used.
        at_least: Fewest characters that are of use.

    Raises:
        TextError: If the file cannot be read as text, or is too short.
    """
    if path is None:
        text, source = "\n".join(pydoc_data.topics.topics.values()), "pydoc_data.topics"
    else:
        source = str(path)
        try:
            with Path(path).open(encoding="utf-8") as file:
                text = file.read(_MOST_CHARACTERS)
        except OSError as error:
            raise TextError(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise TextError(f"{path} is not UTF-8 text: {error.reason}") from error
    if len(text) < at_least:
        raise TextError(
            f"{source} has {len(text)} characters; training needs at least {at_least}: "
            "give a longer text"
        )
    common = [character for character, _ in Counter(text).most_common(_MAX_CHARACTERS)]
    characters = "".join(sorted(common)) + _UNKNOWN
    known = {character: number for number, character in enumerate(characters)}
    unknown = len(characters) - 1
    ids = torch.tensor([known.get(character, unknown) for character in text])
    return Corpus(characters, ids, source)
