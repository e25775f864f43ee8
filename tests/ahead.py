"""Programs that mostly wait: the tests of a module run theirs side by side, and look at each later.

``started`` runs the work of those tests that were selected, so that one alone starts no others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest

__all__ = ["started"]

T = TypeVar("T")


@contextlib.contextmanager
def started(
    request: pytest.FixtureRequest, works: Mapping[str, Callable[[], T]], *, at_once: int
) -> Iterator[Mapping[str, Future[T]]]:
    """Run works in threads, some at once, while the tests of a module run.

    Args:
        request: Of a fixture with the scope of a module.
        works: A work for each of those tests of the module whose name holds its name.
        at_once: How many run side by side.

    Yields:
        What each returns, or raises, to be waited for; none of a work that nobody looks at.
    """
    names = [item.name for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(at_once) as pool:
        try:
            yield {
                key: pool.submit(work)
                for key, work in works.items()
                if any(key in name for name in names)
            }
        finally:
            pool.shutdown(cancel_futures=True)
