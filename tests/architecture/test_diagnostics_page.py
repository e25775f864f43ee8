"""``docs/diagnostics.md`` has all kinds that the code records, each with what to do about it."""

import pytest

from tests.architecture.diagnostics_page import PAGE, UnreadableError, faults, page, recorded
from tests.architecture.diagnostics_text import KINDS
from tests.architecture.source_tree import SourceTree, planted


def test_every_kind_is_explained_and_has_a_remedy_or_a_reason():
    assert faults(recorded(SourceTree())) == {}


def test_the_page_is_that_of_the_code():
    assert PAGE.read_text("utf-8") == page(recorded(SourceTree()))


@pytest.mark.parametrize(
    ("line", "kind", "remedies"),
    [
        ('diagnostics.record("new.kind", "w")', "new.kind", []),
        ('diagnostics.record("new.kind", "w", todo=f"Do {x}.")', "new.kind", ["Do X."]),
        ('diagnostics.record("new.a" if x else "new.b", "w", todo="A " "b.")', "new.b", ["A b."]),
        (
            'def tell(kind, *, todo="Do that."):\n    diagnostics.record(kind, "w", todo=todo)\n'
            'def f():\n    tell("new.kind")\n    tell("new.kind", todo="Do this.")',
            "new.kind",
            ["Do that.", "Do this."],
        ),
        ('KIND = "new.kind"\ndef f():\n    diagnostics.record(KIND, "w")', "new.kind", []),
    ],
)
def test_a_planted_kind_is_seen_with_its_remedies(tmp_path, line, kind, remedies):
    found = recorded(planted(tmp_path, {"src/lens_core/x.py": f"{line}\n"}))
    assert sorted(found[kind].remedies) == remedies
    assert bool(found[kind].without) is not bool(remedies)
    assert kind in faults(found)


@pytest.mark.parametrize(
    "line",
    [
        "def f(error):\n    diagnostics.record(error.kind, 'w')",
        "def f():\n    return diagnostics.record",
        "def _nobody_calls(kind):\n    diagnostics.record(kind, 'w')",
    ],
)
def test_a_planted_kind_that_cannot_be_read_is_an_error(tmp_path, line):
    with pytest.raises(UnreadableError, match=r"lens_core\.x"):
        recorded(planted(tmp_path, {"src/lens_core/x.py": f"{line}\n"}))


def test_a_planted_call_without_a_remedy_is_found(tmp_path):
    kind = next(kind for kind, explained in KINDS.items() if not explained.why_none)
    call = f"diagnostics.record({kind!r}, 'w')\n"
    found = recorded(planted(tmp_path, {"src/lens_core/x.py": call}))
    assert faults(found) == {
        kind: "no remedy, and no reason why there is none: lens_core/x.py line 1"
    }
