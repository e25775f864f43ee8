"""What a package shows is decided: its ``__all__`` is checked in, and users need no more."""

import ast
import importlib
import re

import pytest

from tests.architecture.source_tree import (
    ROOT,
    Module,
    SourceTree,
    differs_from_known,
    found_when_planted,
    planted,
)

#: ``python -m tests.architecture.test_public_names`` writes it; a change in it is one for users.
LIST = ROOT / "tests/architecture/public_names.txt"

_DEMO = "the example trains the model of lens demo, which is nobody's interface"
KNOWN_DEEP = {
    "examples/nccl/pipeline.py: lens_tools.demo.model": _DEMO,
    "examples/nccl/pipeline.py: lens_tools.demo.text": _DEMO,
    "examples/nccl/pipeline.py: lens_tools.demo.training": _DEMO,
}


def public_names(tree):
    """Package to the names in its ``__all__``, for those that have one."""
    found = {}
    for module in tree:
        if not module.is_package:
            continue
        for node in module.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found[module.name] = sorted(ast.literal_eval(node.value))
    return found


def as_text(names):
    return "".join(f"{package}.{name}\n" for package in sorted(names) for name in names[package])


def test_the_public_names_are_those_that_were_decided():
    assert as_text(public_names(SourceTree())).splitlines() == LIST.read_text().splitlines()


def test_a_planted_public_name_is_seen(tmp_path):
    assign = '\n__all__ = ["planted"]\n'
    found = as_text(public_names(planted(tmp_path, {"src/lens_core/spans/__init__.py": assign})))
    assert "lens_core.spans.planted" in found.splitlines()
    assert found != LIST.read_text()


@pytest.mark.parametrize("package", public_names(SourceTree()))
def test_each_public_name_is_there_and_documented(package):
    top = package.partition(".")[2].partition(".")[0]
    if top in ("ray", "torch"):
        pytest.importorskip(top)
    module = importlib.import_module(package)
    assert module.__doc__
    for name in public_names(SourceTree())[package]:
        assert getattr(module, name) is not None
        assert name in dir(module)


def imports_from_deep_inside(tree):
    """Imports in a page or an example from a module that is not directly in one of the three."""
    found = {}
    for path in (*_pages(tree.root), *sorted((tree.root / "examples").rglob("*.py"))):
        text = path.read_text("utf-8")
        blocks = [text] if path.suffix == ".py" else _python_blocks(text)
        named = {
            line
            for block in blocks
            for line in re.findall(r"^\s*(?:from|import) (lens_\w+(?:\.\w+)*)", block, re.MULTILINE)
        }
        if path.suffix != ".py":
            dotted = re.findall(r"`(lens_(?:core|contrib|tools)(?:\.\w+)+)(?:\(\))?`", text)
            named |= {_module_of(tree, name) for name in dotted}
        for name in named:
            module = tree.modules.get(name)
            if name.count(".") > 1 and not (module and module.is_package):
                found[f"{path.relative_to(tree.root)}: {name}"] = "is three levels down"
    return found


def _pages(root):
    return [
        root / "README.md",
        *sorted((root / "docs").glob("*.md")),
        *(root / "examples").rglob("*.md"),
    ]


def _python_blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _module_of(tree, name):
    """The module that a dotted name is in; the whole name where there is none."""
    module = name
    while module and module not in tree.modules:
        module = module.rpartition(".")[0]
    return module or name


def test_what_users_need_is_shown_by_a_package():
    assert differs_from_known(imports_from_deep_inside(SourceTree()), KNOWN_DEEP) == []


def test_planted_imports_from_deep_inside_are_found(tmp_path):
    plant = {
        "README.md": "\n```python\nfrom lens_core.identity.steps import step_span\n```\n",
        "docs/ray.md": "\nas `lens_core.identity.hops.hop_span` has it\n",
        "examples/ray/words.py": "\nimport lens_contrib.torch.waits\n",
    }
    assert found_when_planted(imports_from_deep_inside, tmp_path, plant) == {
        "README.md: lens_core.identity.steps",
        "docs/ray.md: lens_core.identity.hops",
        "examples/ray/words.py: lens_contrib.torch.waits",
    }


def names_that_no_module_has(tree):
    """Dotted names of ours in pages, comments and docstrings that lead nowhere."""
    found = {}
    sources = {str(m.path.relative_to(tree.root)): m.text for m in tree}
    sources |= {
        str(path.relative_to(tree.root)): path.read_text("utf-8") for path in _pages(tree.root)
    }
    for where, text in sources.items():
        for name in re.findall(r"`~?(lens_(?:core|contrib|tools)\.[\w.]+?)(?:\(\))?`", text):
            if not _exists(tree, name):
                found[f"{where}: {name}"] = "does not exist"
    return found


def _exists(tree, name):
    module = _module_of(tree, name)
    if module == name:
        return module in tree.modules
    rest = name[len(module) + 1 :].split(".")
    here = tree.modules.get(module)
    return here is not None and rest[0] in _defined(here)


def _defined(module: Module):
    names = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


KNOWN_NAMES: dict[str, str] = {}


def test_each_name_of_ours_in_the_text_exists():
    assert differs_from_known(names_that_no_module_has(SourceTree()), KNOWN_NAMES) == []


def test_planted_names_that_do_not_exist_are_found(tmp_path):
    plant = {
        "docs/hangs.md": "\nsee `lens_core.journal.nonesuch`\n",
        "src/lens_core/state.py": "\n# :func:`~lens_core.links.nonesuch`\n",
    }
    assert found_when_planted(names_that_no_module_has, tmp_path, plant) == {
        "docs/hangs.md: lens_core.journal.nonesuch",
        "src/lens_core/state.py: lens_core.links.nonesuch",
    }


if __name__ == "__main__":
    LIST.write_text(as_text(public_names(SourceTree())))
