"""Compares the nodes of a derived graph with those of a real session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from recipes.kinds.node_lists import NodeList, NodeRow


class Difference(BaseModel):
    """One node that differs between the two graphs; `what` is `provider`, `operator`, `only real` or `only derived`."""

    model_config = ConfigDict(frozen=True)

    model: str
    what: str
    operator: str
    opset: int | None = None
    types: str = ""
    derived: str = ""
    real: str = ""
    tensor: str = ""


class Compared(BaseModel):
    """A model's derived graph compared with the real one.

    Attributes:
        way: `static` or `dynamic`, see `NodeList`.
        nodes: number of nodes of the real graph, without copies.
        same: number of these that the derived graph has with the same operator and provider.
        copies, derived_copies: numbers of MemcpyToHost and of MemcpyFromHost in each.
        kernels, same_kernels: number of kernels of the real graph as Hase analyses it there, and of those that the derived one
            has.
        error: why nothing could be compared.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    way: str = ""
    nodes: int = 0
    same: int = 0
    copies: tuple[int, int] = (0, 0)
    derived_copies: tuple[int, int] = (0, 0)
    kernels: int = 0
    same_kernels: int = 0
    error: str = ""
    differences: tuple[Difference, ...] = ()

    @property
    def agrees(self) -> bool:
        return not self.error and self.nodes == self.same and self.copies == self.derived_copies

    def columns(self) -> dict[str, Any]:
        """As a row of a table."""
        return {"model": self.model, "session": self.way, "nodes": self.nodes, "same": self.same,
                "copies to / from the host": f"{self.copies[0]} / {self.copies[1]}",
                "derived": f"{self.derived_copies[0]} / {self.derived_copies[1]}",
                "kernels": self.kernels, "same kernels": self.same_kernels, "error": self.error or None}


def compare(real: NodeList, derived: NodeList) -> Compared:
    """Compares the derived graph of a model with that of a real session."""
    if derived.error or not real.nodes:
        error = f"derived: {derived.error}" if derived.error else f"real: {real.error}"
        return Compared(model=real.model, way=real.way, error=error)
    nodes = [node for node in real.nodes if not node.is_copy]
    pairs, only_real, only_derived = match(nodes, [node for node in derived.nodes if not node.is_copy])
    unlike = [(node, derived_node) for node, derived_node in pairs
              if (node.operator, node.provider) != (derived_node.operator, derived_node.provider)]
    differences = [_difference(real, "provider" if node.operator == derived_node.operator else "operator", node, derived_node)
                   for node, derived_node in unlike]
    differences += [_difference(real, "only real", node, None) for node in only_real]
    differences += [_difference(real, "only derived", None, derived_node) for derived_node in only_derived]
    return Compared(
        model=real.model, way=real.way, nodes=len(nodes), same=len(pairs) - len(unlike), copies=_copies(real),
        derived_copies=_copies(derived), kernels=sum(real.kernels.values()),
        same_kernels=sum((Counter(real.kernels) & Counter(derived.kernels)).values()), differences=tuple(differences))


def match(real: Sequence[NodeRow], derived: Sequence[NodeRow]) -> tuple[
        list[tuple[NodeRow, NodeRow]], list[NodeRow], list[NodeRow]]:
    """Pairs of matching nodes, the real one first; then the real and the derived nodes without a match.

    Two nodes match if they make a tensor of the same name with the same operator. The others are matched by operator and
    provider, then by operator alone, and at last by the name of a tensor alone.
    """
    left = {id(node): node for node in derived}
    by_output = {name: node for node in derived for name in node.outputs if name}
    pairs: list[tuple[NodeRow, NodeRow]] = []

    def paired(node: NodeRow, candidates: Iterable[NodeRow]) -> bool:
        matching = next((candidate for candidate in candidates if id(candidate) in left), None)
        if matching is not None:
            pairs.append((node, left.pop(id(matching))))
        return matching is not None

    def makers(node: NodeRow) -> list[NodeRow]:
        return [by_output[name] for name in node.outputs if name in by_output]

    waiting = [node for node in real if not paired(node, (
        candidate for candidate in makers(node) if candidate.operator == node.operator))]
    for exact in (True, False):
        waiting = [node for node in waiting if not paired(node, (
            candidate for candidate in derived
            if candidate.operator == node.operator and (candidate.provider == node.provider or not exact)))]
    waiting = [node for node in waiting if not paired(node, makers(node))]
    return pairs, waiting, list(left.values())


def _copies(of: NodeList) -> tuple[int, int]:
    counts = Counter(node.op_type for node in of.nodes)
    return counts["MemcpyToHost"], counts["MemcpyFromHost"]


def _difference(real: NodeList, what: str, node: NodeRow | None, derived: NodeRow | None) -> Difference:
    present = [listed for listed in (node, derived) if listed is not None]

    def side(listed: NodeRow | None) -> str:
        return "" if listed is None else f"{listed.operator} {listed.provider}" if what == "operator" else listed.provider

    return Difference(model=real.model, what=what, operator=present[0].operator, opset=real.opsets.get(present[0].domain),
                      types=" ".join(next((listed.types for listed in present if listed.types), ())), derived=side(derived),
                      real=side(node), tensor=next(iter(present[0].outputs), ""))
