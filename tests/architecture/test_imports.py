"""Imports point down: between the three packages, the floors of each, and all folders."""

import json
import subprocess
import sys

import pytest

from tests.architecture.source_tree import (
    PACKAGES,
    SourceTree,
    differs_from_known,
    found_when_planted,
    planted,
)

#: From the ground up: what stands in a line may import what stands in earlier ones. What a package
#: holds and is not named here is on its ground: the small core, in ``lens_core``.
FLOORS = {
    "lens_core": ("", "sdk", "otlp", "journal", "telemetry", "testing"),
    "lens_contrib": (
        "torch",
        "torch_distributed nccl pipelining",
        "ray bootstrap torch_instrumentor",
    ),
    "lens_tools": ("", "demo doctor groups hang launch recover", "cli"),
}
#: Folders that stand beside each other: neither imports the other.
STRANGERS = [
    ("lens_core.testing", "lens_core.sdk"),
    ("lens_core.testing", "lens_core.otlp"),
    ("lens_core.testing", "lens_core.journal"),
    ("lens_core.testing", "lens_core.telemetry"),
    ("lens_contrib.ray", "lens_contrib.torch"),
    ("lens_contrib.ray", "lens_contrib.nccl"),
    ("lens_contrib.ray", "lens_contrib.torch_distributed"),
    ("lens_contrib.ray", "lens_contrib.pipelining"),
]

KNOWN_UPWARD: dict[str, str] = {}
KNOWN_CIRCLES: dict[str, str] = {}


def floor(name):
    """How high a module stands: its package, and the floor within it."""
    package, _, rest = name.partition(".")
    child = rest.partition(".")[0]
    for height, line in enumerate(FLOORS[package]):
        if child in line.split():
            return PACKAGES.index(package), height
    # A package's own ``__init__`` is its roof: it shows what is below.
    return PACKAGES.index(package), 0 if child else len(FLOORS[package])


def imports_that_point_up(tree):
    found = {}
    for module in tree:
        for line, target in tree.imports(module):
            strange = any(
                {module.name.startswith(f"{a}."), target.startswith(b)} == {True}
                or {module.name.startswith(f"{b}."), target.startswith(a)} == {True}
                for a, b in STRANGERS
            )
            if strange or floor(target) > floor(module.name):
                found[f"{module.name} -> {target}"] = f"line {line}"
    return found


def _edges(tree, package):
    """Imports among what is directly in a package: folders, modules, its ``__init__``."""
    edges = {}
    prefix = package + "."

    def child(name):
        return name[len(prefix) :].partition(".")[0] if name.startswith(prefix) else "__init__"

    for module in tree:
        if module.name != package and not module.name.startswith(prefix):
            continue
        for line, target in tree.imports(module):
            if target == package or target.startswith(prefix):
                source, target_child = child(module.name), child(target)
                if source != target_child:
                    where = f"{module.name} line {line} imports {target}"
                    edges.setdefault(source, {}).setdefault(target_child, where)
    return edges


def circles(tree):
    """In each package, among its folders and modules: groups of which each reaches the others."""
    found = {}
    for package in sorted(module.name for module in tree if module.is_package):
        edges = _edges(tree, package)

        def reaches(start, edges=edges):
            seen, todo = set(), [start]
            while todo:
                for node in edges.get(todo.pop(), ()):
                    if node not in seen:
                        seen.add(node)
                        todo.append(node)
            return seen

        reach = {node: reaches(node) for node in edges}
        for node in edges:
            circle = sorted(o for o in reach[node] if node in reach.get(o, ()))
            if node in circle:
                told = [
                    where
                    for source in circle
                    for target, where in edges[source].items()
                    if target in circle
                ]
                found[f"{package}: {' '.join(circle)}"] = "; ".join(told)
    return found


def test_imports_point_down():
    assert differs_from_known(imports_that_point_up(SourceTree()), KNOWN_UPWARD) == []


def test_no_circle_of_folders_or_modules():
    assert differs_from_known(circles(SourceTree()), KNOWN_CIRCLES) == []


@pytest.mark.parametrize(
    ("file", "line", "edge"),
    [
        ("lens_core/frame.py", "import lens_contrib.ray", "lens_core.frame -> lens_contrib.ray"),
        (
            "lens_core/state.py",
            "if __name__:\n    from lens_core.journal import format",
            "lens_core.state -> lens_core.journal.format",
        ),
        (
            "lens_core/journal/format.py",
            "def f():\n    from lens_core.telemetry.setup import setup_telemetry",
            "lens_core.journal.format -> lens_core.telemetry.setup",
        ),
        (
            "lens_contrib/torch/__init__.py",
            "from ..nccl import send",
            "lens_contrib.torch -> lens_contrib.nccl",
        ),
        (
            "lens_core/links.py",
            "from lens_core import linked_span",
            "lens_core.links -> lens_core",
        ),
        (
            "lens_contrib/ray/worker.py",
            "import lens_contrib.torch.store",
            "lens_contrib.ray.worker -> lens_contrib.torch.store",
        ),
    ],
)
def test_a_planted_import_upwards_is_found(tmp_path, file, line, edge):
    plant = {f"src/{file}": f"\n{line}\n"}
    assert edge in found_when_planted(imports_that_point_up, tmp_path, plant)


def test_a_planted_circle_is_found(tmp_path):
    plant = {
        "src/lens_tools/one/__init__.py": '"""One."""\n',
        "src/lens_tools/one/a.py": "from lens_tools.two import b\n",
        "src/lens_tools/two/__init__.py": '"""Two."""\n',
        "src/lens_tools/two/b.py": "if TYPE_CHECKING:\n    from lens_tools import three\n",
        "src/lens_tools/three.py": "def f():\n    from lens_tools.one.a import g\n",
    }
    assert found_when_planted(circles, tmp_path, plant) == {"lens_tools: one three two"}


#: What ``import lens_core`` loads nothing of.
FOREIGN = ("opentelemetry.sdk", "opentelemetry.exporter", "torch", "ray", "numpy", "google", "grpc")
KNOWN_LOADED: dict[str, str] = {}


def loaded_beside_the_small_core(root=None):
    """What ``import lens_core`` loads beside the small core, in a new process."""
    program = (
        "import json, sys; before = {*sys.modules}; import lens_core; "
        "print(json.dumps([lens_core.__file__, *({*sys.modules} - before)]))"
    )
    environment = {} if root is None else {"PYTHONPATH": str(root / "src")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    where, *loaded = json.loads(done.stdout)
    assert root is None or where.startswith(str(root))
    foreign = {n for n in loaded if n in FOREIGN or n.startswith(tuple(f"{f}." for f in FOREIGN))}
    above = set(FLOORS["lens_core"][1:])
    ours = {n.split(".")[1] for n in loaded if n.startswith("lens_core.")} & above
    others = {n for n in loaded if n.partition(".")[0] in PACKAGES[1:]}
    return dict.fromkeys(foreign | ours | others, "is loaded by import lens_core")


def test_importing_lens_core_loads_the_small_core_only():
    assert differs_from_known(loaded_beside_the_small_core(), KNOWN_LOADED) == []


def test_a_planted_import_of_more_is_found(tmp_path):
    planted(
        tmp_path,
        {"src/lens_core/state.py": "\nimport opentelemetry.sdk.trace\nimport lens_core.otlp\n"},
    )
    assert {"opentelemetry.sdk", "otlp"} <= loaded_beside_the_small_core(tmp_path).keys()
