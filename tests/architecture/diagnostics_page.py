"""Writes ``docs/diagnostics.md`` from the code: ``python -m tests.architecture.diagnostics_page``.

Kinds, remedies and places are read from each call of ``diagnostics.record``, also where a function
is handed them; what a kind means, and why one has no remedy, is said in ``diagnostics_text``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.architecture.diagnostics_text import KINDS, NO_REMEDY, Kind
from tests.architecture.source_tree import ROOT, Module, SourceTree

PAGE = ROOT / "docs/diagnostics.md"

# ruff: noqa: E501 - a paragraph of the page is one line
HEAD = """\
# Diagnostics

<!-- Written by python -m tests.architecture.diagnostics_page; texts are in diagnostics_text.py. -->

Telemetry never raises into a training step. What goes wrong is survived, counted by kind, and logged at WARNING by the logger `lens_core`, once per kind and remedy. The metric `lens.diagnostics` has the counts, by `lens.kind`; in a program it is `lens_core.diagnostics.diagnostics.counts()`.

Each kind is below: what it means, what to do, and where in `src` it is recorded. `SIGNAL` is `spans`, `metrics` or `logs`.
"""


@dataclass(slots=True)
class Recorded:
    """What the code says of one kind."""

    remedies: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that records, in the function that it stands in."""

    module: Module
    scope: ast.AST
    kind: ast.expr | None
    todo: ast.expr | None
    line: int


class UnreadableError(ValueError):
    """A kind or a remedy that cannot be read from the code."""


def recorded(tree: SourceTree) -> dict[str, Recorded]:
    """All kinds that the code records.

    Raises:
        UnreadableError: If a call's kind or remedy is no text that can be found.
    """
    found: dict[str, Recorded] = {}
    for call in _calls(tree):
        for kind, todo in _texts(tree, call):
            entry = found.setdefault(kind, Recorded())
            place = str(call.module.path.relative_to(tree.root / "src"))
            if place not in entry.modules:
                entry.modules.append(place)
            if not todo:
                entry.without.append(f"{place} line {call.line}")
            elif todo not in entry.remedies:
                entry.remedies.append(todo)
    return dict(sorted(found.items()))


def _calls(tree: SourceTree) -> Iterator[_Call]:
    for module in tree:
        called = {id(node.func) for node in ast.walk(module.tree) if isinstance(node, ast.Call)}
        for scope, node in _with_scopes(module.tree):
            if _is_record(node) and id(node) not in called:
                raise UnreadableError(f"{module.name}: record is handed on, not called")
            if isinstance(node, ast.Call) and _is_record(node.func):
                arguments = {keyword.arg: keyword.value for keyword in node.keywords}
                kind = node.args[0] if node.args else arguments.get("kind")
                yield _Call(module, scope, kind, arguments.get("todo"), node.lineno)


def _is_record(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr != "record":
        return False
    return ast.unparse(node.value).endswith("diagnostics")


def _with_scopes(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Every node, each with the innermost function around it."""
    todo: list[tuple[ast.AST, ast.AST]] = [(tree, tree)]
    while todo:
        scope, node = todo.pop()
        yield scope, node
        inner = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else scope
        todo += [(inner, child) for child in ast.iter_child_nodes(node)]


def _texts(tree: SourceTree, call: _Call) -> Iterator[tuple[str, str]]:
    """The kinds and remedies of a call: one pair, or one per caller of a function around it."""
    parameters = _parameters(call.scope)
    asked = {n.id for n in (call.kind, call.todo) if isinstance(n, ast.Name)} & parameters.keys()
    if not asked:
        for kind in _text(call, call.kind):
            for todo in _text(call, call.todo):
                yield kind, todo
        return
    name = call.scope.name  # type: ignore[attr-defined]
    callers = 0
    for module in [call.module] if name.startswith("_") else tree:
        for scope, node in _with_scopes(module.tree):
            if isinstance(node, ast.Call) and _last_name(node.func) == name:
                callers += 1
                given = _given(node, parameters)
                kind, todo = (
                    given.get(n.id, parameters[n.id][1])
                    if isinstance(n, ast.Name) and n.id in asked
                    else n
                    for n in (call.kind, call.todo)
                )
                yield from _texts(tree, _Call(module, scope, kind, todo, node.lineno))
    if not callers:
        raise UnreadableError(f"{call.module.name} line {call.line}: nobody calls {name}")


def _parameters(scope: ast.AST) -> dict[str, tuple[int, ast.expr | None]]:
    """Name to position (-1 for keyword only; ``self`` does not count) and default."""
    if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        return {}
    arguments = scope.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    offset = 1 if positional and positional[0].arg in ("self", "cls") else 0
    found: dict[str, tuple[int, ast.expr | None]] = {
        argument.arg: (place - offset, default)
        for place, (argument, default) in enumerate(zip(positional, defaults, strict=True))
    }
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[argument.arg] = (-1, default)
    return found


def _given(
    node: ast.Call, parameters: Mapping[str, tuple[int, ast.expr | None]]
) -> dict[str, ast.expr]:
    by_place = {place: name for name, (place, _) in parameters.items() if place >= 0}
    given = {by_place[n]: value for n, value in enumerate(node.args) if n in by_place}
    given.update({k.arg: k.value for k in node.keywords if k.arg})
    return given


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _text(call: _Call, node: ast.expr | None) -> list[str]:
    """The texts that an expression may be, with what it fills in as a word in capitals."""
    if node is None:
        return [""]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return [*_text(call, node.body), *_text(call, node.orelse)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(_part(call, part) for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [a + b for a in _text(call, node.left) for b in _text(call, node.right)]
    if isinstance(node, ast.Dict):  # any of its values; a ** of another has its own
        return [text for value in node.values for text in _text(call, value)]
    if isinstance(node, ast.Call) and _last_name(node.func) in ("get", "fromkeys"):
        # TABLE.get(key, otherwise), dict.fromkeys(keys, value)
        table = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        found = [] if ast.unparse(table) == "dict" else _text(call, table)
        return [*found, *(text for other in node.args[1:] for text in _text(call, other))]
    if isinstance(node, ast.Name):
        for scope in (call.scope, call.module.tree):
            values = [
                assigned.value
                for assigned in ast.walk(scope)
                if isinstance(assigned, ast.Assign | ast.AnnAssign)
                and assigned.value is not None
                and node.id in map(ast.unparse, _targets(assigned))
            ]
            if values:
                return [text for value in values for text in _text(call, value)]
    raise UnreadableError(f"{call.module.name} line {call.line}: {ast.unparse(node)} is no text")


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _part(call: _Call, part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    value = part.value
    if isinstance(value, ast.Name):
        try:
            (text,) = _text(call, value)
            return text
        except (UnreadableError, ValueError):
            pass
    words = re.findall(r"[A-Za-z]+", _last_name(value))
    return (words[-1] if words else "value").upper()


def faults(found: Mapping[str, Recorded], texts: Mapping[str, Kind] = KINDS) -> dict[str, str]:
    """Kinds that are not explained or not recorded, and missing remedies without a reason."""
    faults = dict.fromkeys(found.keys() - texts.keys(), "is not explained")
    faults |= dict.fromkeys(texts.keys() - found.keys(), "is explained and not recorded")
    for kind in found.keys() & texts.keys():
        without = found[kind].without
        if without and not texts[kind].why_none:
            faults[kind] = f"no remedy, and no reason why there is none: {', '.join(without)}"
        elif texts[kind].why_none and not without:
            faults[kind] = "has a reason for having no remedy, and has remedies everywhere"
    return faults


def page(found: Mapping[str, Recorded], texts: Mapping[str, Kind] = KINDS) -> str:
    """The whole page."""
    parts, before = [HEAD], ""
    for kind, entry in found.items():
        topic = kind.partition(".")[0]
        if topic != before:
            parts.append(f"\n## {topic}\n")
            before = topic
        explained = texts[kind]
        lines = [f"**`{kind}`**: {explained.meaning}", ""]
        lines += [f"- {_as_markdown(todo)}" for todo in entry.remedies]
        if explained.why_none:
            also = "Otherwise nothing to do: " if entry.remedies else "Nothing to do: "
            lines.append(f"- {also}{NO_REMEDY.get(explained.why_none, explained.why_none)}")
        lines.append(f"- Recorded in {', '.join(f'`{place}`' for place in entry.modules)}.")
        parts.append("\n" + "\n".join(lines) + "\n")
    return "".join(parts)


def _as_markdown(text: str) -> str:
    return re.sub(r"(?<![`\w])(\w+(?:\.\w+)*\(\)|[A-Z]+_[A-Z_]+|@\w+)(?![`\w])", r"`\1`", text)


if __name__ == "__main__":
    everything = recorded(SourceTree())
    missing = {kind: why for kind, why in faults(everything).items() if kind not in KINDS}
    if missing:
        raise SystemExit("\n".join(f"{kind}: {why}" for kind, why in missing.items()))
    PAGE.write_text(page(everything), "utf-8")
