"""What a page names exists: files, folders, tests and anchors."""

import ast
import re

import pytest

from tests.architecture.source_tree import ROOT, differs_from_known, planted

#: Where a relative path in a page may start.
STARTS = ("", "src", "tests")
KNOWN: dict[str, str] = {}


def pages(root):
    names = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    found = [root / name for name in names if (root / name).is_file()]
    return [
        *found,
        *sorted((root / "docs").rglob("*.md")),
        *sorted((root / "examples").rglob("*.md")),
    ]


def what_is_named_and_missing(root):
    """As ``page: name``: paths and tests in backticks, and targets of relative links."""
    found = {}
    for page in pages(root):
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        named = [n for n in re.findall(r"`([^`\s]+)`", text) if _is_path(n)]
        # "`telemetry/test_x.py::test_a`, `::test_b`" is two tests of one file.
        before = ""
        for name in re.findall(r"`([^`\s]*::\w+)`|`([^`\s]+\.py)`", text):
            file, _, test = (name[0] or name[1]).partition("::")
            before = file or before
            named += [f"{before}::{test}"] if test else []
        links = re.findall(r"\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)", text)
        missing = [name for name in named if not _exists(root, page, name)]
        missing += [t + anchor for t, anchor in links if not _link_leads(page, t, anchor)]
        for name in missing:
            found[f"{page.relative_to(root)}: {name}"] = "does not exist"
    return found


def _is_path(name):
    """A path of this project, rather than one of a user's."""
    if "::" in name or not re.fullmatch(r"[\w./-]+", name) or name.startswith("/"):
        return False
    top = name.partition("/")[0]
    tops = {
        "docs",
        "examples",
        "tests",
        "benchmarks",
        "src",
        "lens_core",
        "lens_contrib",
        "lens_tools",
    }
    return ("/" in name and top in tops) or (name.endswith((".md", ".py")) and "/" in name)


def _exists(root, page, name):
    path, _, test = name.partition("::")
    starts = [root / start for start in STARTS] + [page.parent]
    for start in starts:
        # Tests and benchmarks are not in the copies in which faults are planted.
        here = start / path if (start / path).exists() else ROOT / start.relative_to(root) / path
        if here.exists():
            return not test or test in _functions(here)
    return False


def _functions(path):
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _link_leads(page, target, anchor):
    path = page.parent / target if target else page
    if not path.exists():
        return False
    if not anchor:
        return True
    heads = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), flags=re.MULTILINE)
    return anchor[1:] in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


def test_all_that_pages_name_exists():
    assert differs_from_known(what_is_named_and_missing(ROOT), KNOWN) == []


@pytest.mark.parametrize(
    "name",
    [
        "`docs/nonesuch.md`",
        "`lens_core/nonesuch.py`",
        "`tests/test_spans.py::test_nonesuch`",
        "`telemetry/test_nonesuch.py`",
        "[page](nonesuch.md)",
        "[part](#no-such-part)",
    ],
)
def test_a_planted_name_of_nothing_is_found(tmp_path, name):
    planted(tmp_path, {"docs/ray.md": f"\n{name}\n"})
    (found,) = what_is_named_and_missing(tmp_path).keys() - what_is_named_and_missing(ROOT).keys()
    assert found.startswith("docs/ray.md: ")
    assert found[len("docs/ray.md: ") :] in name
