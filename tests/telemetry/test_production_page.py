"""The table of ``docs/production.md`` names tests and benches that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "production.md").read_text()
TABLE = PAGE[PAGE.index("## What holds these promises") :]


def test_every_row_names_what_exists():
    rows = [line for line in TABLE.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 20
    for row in rows:
        held_by = row.split("|")[2]
        named = re.findall(r"`([\w/]+\.py)?(?:::(\w+))?`", held_by)
        named = [(path, test) for path, test in named if path or test]
        benches = re.findall(r"bench `(\w+)`", held_by)
        links = re.findall(r"\]\(#([\w-]+)\)", held_by)
        assert named or benches or links, row
        file = ""
        for path, test in named:
            file = path or file
            text = (ROOT / "tests" / file).read_text()
            assert not test or f"def {test}(" in text, f"{file}::{test}"
        for bench in benches:
            assert (ROOT / "benchmarks" / f"bench_{bench}.py").is_file(), bench
        for link in links:
            titles = re.findall(r"^#+ (.*)$", PAGE, re.M)
            anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            assert link in anchors, link
