"""A number that somebody else wrote: in the environment of a launcher, or in a small file."""

from __future__ import annotations

from typing import Final

__all__ = ["whole_number"]

#: The attributes of OTLP are 64-bit integers with a sign.
_LARGEST: Final = 2**63 - 1


def whole_number(text: str, *, largest: int = _LARGEST) -> int | None:
    """The number that the text is, from 0; ``None`` where it is none. Never raises.

    Stricter than ``str.isdigit``, which is also true of digits that ``int`` refuses, as of ``²``,
    and of more digits than ``int`` converts.

    Args:
        text: Decimal digits of ASCII; white space around them is passed over.
        largest: What is larger is no number.
    """
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()) or len(digits) > len(str(largest)):
        return None
    number = int(digits)
    return number if number <= largest else None
