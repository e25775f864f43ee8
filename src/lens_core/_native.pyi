from collections.abc import Callable
from typing import Any

def bind(name: str, /, *kept: object) -> Callable[..., Any]: ...
