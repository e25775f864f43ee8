"""One tree of errors, drawn in ``lens_core/errors.py``; each is a builtin error as well."""

import ast
import builtins
import re

from tests.architecture.source_tree import ROOT, SourceTree, differs_from_known, planted

#: Exceptions that no caller ever sees, each with what it is for.
KNOWN_OUTSIDE: dict[str, str] = {}

_LINE = re.compile(r"(?:├──|└──)\s+(\w+) \((\w+)\)")


def _bases(tree):
    classes = {}
    for module in tree:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                classes.setdefault(node.name, (names, f"{module.name} line {node.lineno}"))
    return classes


def _builtin(name):
    return isinstance(found := getattr(builtins, name, None), type) and issubclass(
        found, BaseException
    )


def _ancestors(classes, name):
    seen, todo = set(), [name]
    while todo:
        for base in classes.get(todo.pop(), ((), ""))[0]:
            if base not in seen:
                seen.add(base)
                todo.append(base)
    return seen


def errors_outside_the_tree(tree):
    """Exception classes that are no ``LensError``, no builtin one, or are not drawn as they are."""
    classes, found = _bases(tree), {}
    drawn = dict(_LINE.findall(ast.get_docstring(tree.modules["lens_core.errors"].tree) or ""))
    for name, (_, where) in classes.items():
        ancestors = _ancestors(classes, name)
        own = {base for base in ancestors if _builtin(base)} - {"Exception", "BaseException"}
        if not any(map(_builtin, ancestors)) or name == "LensError":
            continue
        if "LensError" not in ancestors:
            found[name] = f"{where}: is no LensError"
        elif not own:
            found[name] = f"{where}: derives from no builtin error"
        elif drawn.get(name) not in own:
            found[name] = f"{where}: is not drawn in lens_core/errors.py, or as another builtin"
    for name in drawn.keys() - classes.keys():
        found[name] = "is drawn in lens_core/errors.py and does not exist"
    return found


def test_all_errors_are_in_the_tree():
    assert differs_from_known(errors_outside_the_tree(SourceTree()), KNOWN_OUTSIDE) == []


def test_planted_errors_outside_the_tree_are_found(tmp_path):
    text = (
        "class Alone(ValueError): ...\n"
        "class Unlike(LensError): ...\n"
        "class Undrawn(LensError, KeyError): ...\n"
        "class Below(StoreError): ...\n"
    )
    found = errors_outside_the_tree(planted(tmp_path, {"src/lens_tools/x.py": text}))
    assert found.keys() >= {"Alone", "Unlike", "Undrawn", "Below"}


def test_an_error_that_is_drawn_and_gone_is_found(tmp_path):
    planted(tmp_path, {})
    errors = tmp_path / "src/lens_core/errors.py"
    errors.write_text(errors.read_text().replace("class FrameError", "class OtherError"))
    assert errors_outside_the_tree(SourceTree(tmp_path)).keys() >= {"FrameError", "OtherError"}
    assert ROOT not in errors.parents
