"""A module is one idea, of at most 250 lines; no two files and no two classes share a name."""

import ast

import pytest

from tests.architecture.source_tree import SourceTree, differs_from_known, found_when_planted

MOST_LINES = 250
#: Modules that may be longer: at most :data:`MOST_EXCEPTIONS`, each with its reason.
LONGER: dict[str, str] = {
    "lens_contrib/ray/compat.py": "a table: each private name of Ray, and what is lost without it",
    "lens_core/identity/steps.py": "run, step and carrier share how a step's owner is found",
    "lens_core/spans/attributes.py": "cleaning and redaction walk a value once, together",
    "lens_core/spans/managed.py": "the kinds of function that trace_fn wraps, beside each other",
    "lens_core/telemetry/pipeline/delivery.py": "queue, retry and shutdown share one lock",
    "lens_core/testing/laws.py": "the ten laws, to be read from the first to the last",
}
MOST_EXCEPTIONS = 8

#: File names that mean the same wherever they stand.
CONVENTIONAL = {
    "__init__": "a package's public names",
    "command": "a subcommand of lens",
    "compat": "the private names of a library that an adapter uses",
    "errors": "the errors of a package",
    "transports": "the transports of an adapter",
}
KNOWN_FILES: dict[str, str] = {
    "hops": "of ids, of the kit and of a run: the same word for the same thing, a hop",
}
KNOWN_CLASSES: dict[str, str] = {
    "_Options": "private to each of its two modules",
}


def modules_that_are_too_long(tree):
    lengths = {str(m.path.relative_to(tree.root / "src")): m.text.count("\n") for m in tree}
    return {name: f"{lines} lines" for name, lines in lengths.items() if lines > MOST_LINES}


def file_names_used_twice(tree):
    places = {}
    for module in tree:
        places.setdefault(module.path.stem, []).append(module.name)
    return {
        stem: ", ".join(names)
        for stem, names in places.items()
        if len(names) > 1 and stem not in CONVENTIONAL
    }


def class_names_used_twice(tree):
    places = {}
    for module in tree:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, set()).add(f"{module.name} line {node.lineno}")
    return {name: ", ".join(sorted(p)) for name, p in places.items() if len(p) > 1}


def test_no_module_is_longer_than_an_idea():
    assert differs_from_known(modules_that_are_too_long(SourceTree()), LONGER) == []


def test_few_modules_may_be_longer():
    assert len(LONGER) <= MOST_EXCEPTIONS
    assert all(LONGER.values())


def test_no_file_name_means_two_things():
    assert differs_from_known(file_names_used_twice(SourceTree()), KNOWN_FILES) == []


def test_no_class_name_means_two_things():
    assert differs_from_known(class_names_used_twice(SourceTree()), KNOWN_CLASSES) == []


def test_a_module_is_not_called_by_a_word_that_says_nothing():
    said_nothing = {"utils", "util", "helpers", "helper", "common", "manager", "misc", "base"}
    words = {word for module in SourceTree() for word in module.name.split(".")}
    assert words & said_nothing == set()


@pytest.mark.parametrize(
    ("check", "file", "text", "name"),
    [
        (modules_that_are_too_long, "lens_tools/x.py", "a = 1\n" * 251, "lens_tools/x.py"),
        (file_names_used_twice, "lens_tools/hang/frame.py", "a = 1\n", "frame"),
        (
            class_names_used_twice,
            "lens_tools/x.py",
            "def f():\n    class Carrier: ...\n",
            "Carrier",
        ),
    ],
)
def test_a_planted_fault_is_found(tmp_path, check, file, text, name):
    assert found_when_planted(check, tmp_path, {f"src/{file}": text}) == {name}
