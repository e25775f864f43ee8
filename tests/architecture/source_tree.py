"""The project's Python files as syntax trees, and copies of them in which to plant a fault."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("lens_core", "lens_contrib", "lens_tools")


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


@dataclass(frozen=True, slots=True)
class Module:
    """One file of ``src``.

    Attributes:
        name: Dotted; a package's is that of its folder.
        path: Where it is.
        is_package: Whether it is an ``__init__.py``.
        text: What is in it.
    """

    name: str
    path: Path
    is_package: bool
    text: str

    @property
    def tree(self) -> ast.Module:
        return _parsed(self.text)

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.name if self.is_package else self.name.rpartition(".")[0]


@cache
def _that_may_import(module: Module) -> list[ast.AST]:
    kinds = (ast.Import, ast.ImportFrom, ast.Constant)
    return [node for node in ast.walk(module.tree) if isinstance(node, kinds)]


class SourceTree:
    """All modules below ``root/src``."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        for path in sorted((root / "src").rglob("*.py")):
            parts = path.relative_to(root / "src").with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            self.modules[name] = Module(name, path, is_package, path.read_text("utf-8"))

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules.values())

    def imports(self, module: Module) -> Iterator[tuple[int, str]]:
        """Line and full name of each module of ours that a module imports, wherever it stands.

        Also those below ``if TYPE_CHECKING``, in functions, and in strings (a table of what is
        imported when it is asked for); but a package in a string is the scope of a tracer.
        """
        for node in _that_may_import(module):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] in PACKAGES:
                        yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                base = absolute_base(module, node)
                if base.partition(".")[0] in PACKAGES:
                    for alias in node.names:
                        inner = f"{base}.{alias.name}"
                        yield node.lineno, inner if inner in self.modules else base
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = self.modules.get(node.value)
                if named is not None and not named.is_package:
                    yield node.lineno, node.value


def absolute_base(module: Module, node: ast.ImportFrom) -> str:
    """The module that a ``from ... import`` names, with relative ones resolved."""
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)


def planted(tmp_path: Path, changes: Mapping[str, str]) -> SourceTree:
    """A copy of the project in which files are new, or have lines added at their end."""
    for folder in ("src", "docs", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder, dirs_exist_ok=True)
    for name in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in changes.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    return SourceTree(tmp_path)


def differs_from_known(found: Mapping[str, str], known: Mapping[str, str]) -> list[str]:
    """What is found and not known, and what is known and no longer found; empty if all is well."""
    new = [f"{name}: {where}" for name, where in sorted(found.items()) if name not in known]
    gone = [f"{name} is mended: take it off the list" for name in known if name not in found]
    return new + gone


def found_when_planted(
    check: Callable[[SourceTree], Mapping[str, str]], tmp_path: Path, changes: Mapping[str, str]
) -> set[str]:
    """What a check finds in a copy with a fault in it, beside what it finds without."""
    return set(check(planted(tmp_path, changes))) - set(check(SourceTree()))
