"""The few questions that a wait-for graph is asked."""

from __future__ import annotations

from collections.abc import Mapping, Set

__all__ = ["components", "cycle_through", "reaching"]


def components(graph: Mapping[str, Set[str]]) -> list[set[str]]:
    """The strongly connected components: sets of nodes that can all reach each other."""
    order: list[str] = []
    seen: set[str] = set()
    for root in graph:
        _visit(graph, root, seen, order)
    reverse: dict[str, set[str]] = {node: set() for node in graph}
    for node, targets in graph.items():
        for target in targets:
            reverse[target].add(node)
    found: list[set[str]] = []
    assigned: set[str] = set()
    for node in reversed(order):
        if node not in assigned:
            members: list[str] = []
            _visit(reverse, node, assigned, members)
            found.append(set(members))
    return found


def reaching(graph: Mapping[str, Set[str]], targets: Set[str]) -> set[str]:
    """The nodes outside of ``targets`` from which one of them can be reached."""
    found: set[str] = set()
    grown = True
    while grown:
        grown = False
        for node, nexts in graph.items():
            if node not in found and node not in targets and nexts & (found | targets):
                found.add(node)
                grown = True
    return found


def cycle_through(graph: Mapping[str, Set[str]], members: Set[str]) -> list[str]:
    """A shortest cycle inside of a strongly connected set of at least two nodes."""
    best: list[str] = []
    for start in sorted(members):
        paths = [[start]]
        seen = {start}
        while paths and (not best or len(paths[0]) < len(best)):
            path = paths.pop(0)
            nexts = graph[path[-1]] & members
            if start in nexts:
                if not best or len(path) < len(best):
                    best = path
                break
            for node in sorted(nexts - seen):
                seen.add(node)
                paths.append([*path, node])
    return best


def _visit(graph: Mapping[str, Set[str]], root: str, seen: set[str], order: list[str]) -> None:
    """Depth first from a node; nodes are added to ``order`` when they are left."""
    if root in seen:
        return
    seen.add(root)
    stack = [(root, iter(sorted(graph[root])))]
    while stack:
        node, nexts = stack[-1]
        following = next((target for target in nexts if target not in seen), None)
        if following is None:
            stack.pop()
            order.append(node)
        else:
            seen.add(following)
            stack.append((following, iter(sorted(graph[following]))))
