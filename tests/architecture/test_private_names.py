"""Names that another library keeps to itself are used in one place for each."""

import ast
import functools
import importlib
import re
import sys

import pytest

from tests.architecture.source_tree import (
    PACKAGES,
    SourceTree,
    found_when_planted,
)

FOREIGN = ("opentelemetry", "ray", "torch")
#: Where they may be used: what breaks with a new version is looked for here, and tested here.
PLACES = ("lens_core.sdk.", "lens_core.compat", "lens_contrib.*.compat")
#: Private by name only: how OpenTelemetry publishes its signal of logs
#: (https://opentelemetry.io/docs/languages/python/#status-and-releases).
PUBLISHED = (
    "opentelemetry._logs",
    "opentelemetry.sdk._logs",
    "opentelemetry.sdk._logs.export",
    "opentelemetry.exporter.otlp.proto.common._log_encoder",
)

#: Documented, in spite of their underscore: https://docs.python.org/3/library/collections.html.
NAMED_TUPLE = ("_replace", "_asdict", "_make", "_fields")


def _private(name):
    """Not published, not special (``__x__``, an enum's ``_x_``), not set by us on theirs."""
    special = name.endswith("_") or name in NAMED_TUPLE or name.startswith("_lens_")
    return name.startswith("_") and not special


def _may_use_them(name):
    head, _, last = name.rpartition(".")
    return (
        name.startswith(PLACES[0])
        or name == PLACES[1]
        or (last == "compat" and head.startswith("lens_contrib."))
    )


@functools.cache
def _own_names(module):
    """The private names that a module defines: they are foreign to no code in it."""
    names = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if _root(node.value) in ("self", "cls") else set()
    return names


def _root(node):
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


@functools.cache
def _imported(module):
    """Local name to the top package that it was imported from."""
    tops = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                tops[name] = alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                tops[alias.asname or alias.name] = (node.module or "").partition(".")[0]
    return tops


@functools.cache
def _candidates(module):
    """The nodes that could use a private name: few of all, and the same for each planted fault."""
    return [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call | ast.Compare)
        or (isinstance(node, ast.Attribute) and node.attr.startswith("_"))
    ]


def foreign_private_names(tree, *, in_places=False):
    """Uses outside of the places for them, or in them, as ``module: name``."""
    names_of = {module.name: _own_names(module) for module in tree}
    everywhere, found = set().union(*names_of.values()), {}
    for module in tree:
        if _may_use_them(module.name) is not in_places:
            continue
        # A module may read what is private to one of ours that it imports: a fast path.
        near = {module.name, *(target for _, target in tree.imports(module))}
        tops, own = _imported(module), set().union(*(names_of.get(name, set()) for name in near))
        for node in _candidates(module):
            for name in _used(node, tops, own, everywhere):
                found[f"{module.name}: {name}"] = f"line {node.lineno}"
    return found


def _used(node, tops, own, everywhere):
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        names = []
    for name in names:
        top, *inner = name.split(".")
        for published in PUBLISHED:
            if name == published or name.startswith(f"{published}."):
                inner = name[len(published) :].split(".")
        if top in FOREIGN and any(map(_private, inner)):
            yield name
    if isinstance(node, ast.Attribute) and _private(node.attr):
        root = _root(node.value)
        top = tops.get(root, "")
        # What an object of ours has may be set in a base class of another module.
        known = everywhere if root in ("self", "cls") else own
        if top in FOREIGN or (
            node.attr not in known and top not in sys.stdlib_module_names and top not in PACKAGES
        ):
            yield node.attr
    if isinstance(node, ast.Compare) and getattr(node.left, "attr", "") == "__name__":
        # Their class, by its name: it is not even missed where it goes.
        values = (getattr(one, "value", "") for one in node.comparators)
        yield from (one for one in values if isinstance(one, str) and _private(one))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "setattr", "hasattr", "delattr")
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
        and _private(str(node.args[1].value))
        and node.args[1].value not in own
        and tops.get(_root(node.args[0]), "") not in sys.stdlib_module_names
    ):
        yield str(node.args[1].value)


def test_foreign_private_names_are_used_in_their_places_only():
    assert foreign_private_names(SourceTree()) == {}


COMPATS = [m.name for m in SourceTree() if m.name.endswith("compat")]


@pytest.mark.parametrize("name", COMPATS)
def test_each_place_tests_itself_and_finds_all_there(name):
    """Where one goes missing with a new version, this fails loudly; a job only gets slower."""
    library = name.split(".")[1]
    if name.startswith("lens_contrib."):
        pytest.importorskip({"ray": "ray"}.get(library, "torch"))
    assert importlib.import_module(name).check_private_names() == []


def _tested_names(compat):
    """What a self-test looks at: the names in its table, and what that names to find them."""
    tree = SourceTree().modules[compat].tree
    (table,) = (
        node
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "PRIVATE_NAMES"
    )
    named = {node.id for node in ast.walk(table) if isinstance(node, ast.Name)}
    finders = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in named]
    return set(re.findall(r"\w+", " ".join(map(ast.unparse, [table, *finders])))) | {
        name for use in importlib.import_module(compat).PRIVATE_NAMES for name in use.names.split()
    }


def test_each_private_name_that_is_used_is_tested():
    for library in ("torch", "ray"):
        pytest.importorskip(library)
    tested = {}
    for compat in COMPATS:
        folder = compat.removesuffix(".compat").removesuffix(".sdk")
        tested[folder] = tested.get(folder, set()) | _tested_names(compat)
    untested = []
    for use in foreign_private_names(SourceTree(), in_places=True):
        module, _, name = use.partition(": ")
        folder = module.rpartition(".")[0].removesuffix(".sdk")
        # What is imported by name fails where it is imported.
        if "." not in name and name not in tested[folder]:
            untested.append(use)
    assert untested == []


def test_the_hooks_of_a_stage_are_those_that_are_tested():
    hooks = SourceTree().modules["lens_contrib.pipelining.stage_hooks"].text
    compat = importlib.import_module("lens_contrib.pipelining.compat")
    hooked = re.findall(r'^            "(\w+)": self\.', hooks, re.MULTILINE)
    assert sorted(hooked) == sorted(compat.STAGE_METHODS)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from opentelemetry.sdk.trace import _Span", "opentelemetry.sdk.trace._Span"),
        ("import torch._C", "torch._C"),
        (
            "from opentelemetry.sdk._logs._internal import LogData",
            "opentelemetry.sdk._logs._internal.LogData",
        ),
        ("from ray._private import worker", "ray._private.worker"),
        ("import torch\nx = torch.distributed._world", "_world"),
        ("def f(span):\n    return span._nobody_of_ours", "_nobody_of_ours"),
        ("def f(span):\n    span.other()._nobody_of_ours = 1", "_nobody_of_ours"),
        ("def f(span):\n    return getattr(span, '_nobody_of_ours', 1)", "_nobody_of_ours"),
        ("def f(one):\n    return type(one).__name__ == '_TheirClass'", "_TheirClass"),
        ("class C(Foreign):\n    def f(self):\n        return self._inherited", "_inherited"),
    ],
)
def test_a_planted_use_is_found_but_in_its_place(tmp_path, line, name):
    plant = {
        "src/lens_core/x.py": line,
        "src/lens_core/sdk/x.py": line,
        "src/lens_contrib/ray/compat.py": "\n" + line,
    }
    assert found_when_planted(foreign_private_names, tmp_path, plant) == {f"lens_core.x: {name}"}


def test_what_is_ours_or_published_is_no_use(tmp_path):
    text = (
        "import sys\n"
        "from opentelemetry._logs import get_logger\n"
        "from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor\n"
        "class C:\n    def __init__(self): self._mine = sys._getframe()\n"
        "def f(c): return c._mine, c.__class__\n"
    )
    plant = {"src/lens_core/x.py": text}
    assert found_when_planted(foreign_private_names, tmp_path, plant) == set()
