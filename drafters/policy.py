"""How to draft, which is the user's choice: a chain, a dynamic tree, a tree of fixed shape.

A policy is plain data. Which of them a drafter can follow, it says itself (`Drafter.check`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from draftsmith.drafters.errors import UserError


@dataclass(frozen=True)
class Policy:
    """A chain of k tokens.

    block: a sampled chain is judged by block verification (Sun et al. 2403.10444), which keeps
    more of it than judging token by token; nothing changes where drafts are deterministic.

    confidence: a draft ends before the first depth whose predicted survival, the chance that it and
    all depths before it are accepted, is below this. Whether a depth is drafted depends on the
    state and on the drafts before it, never on its own: the output's law stays the target's.
    """

    k: int
    block: bool = False
    confidence: float | None = None

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UserError(f"k: {self.k} is not a draft length; use 1 or more")
        if self.confidence is not None and not 0 < self.confidence <= 1:
            raise UserError(
                f"confidence: {self.confidence} is no chance to cut at; use a number above 0, up "
                "to 1"
            )

    @property
    def is_chain(self) -> bool:
        return type(self) is Policy

    @property
    def sampled(self) -> bool:
        """Whether drafts are drawn from q at temperatures above 0; else they are its best ones."""
        return True

    @property
    def nodes(self) -> int:
        """Most tokens that one verify pass reads, the root included."""
        return self.k + 1

    @property
    def slots(self) -> int:
        """Most cache slots that one round takes, of the target's cache or the drafter's."""
        return self.nodes

    def __str__(self) -> str:
        cut = "" if self.confidence is None else f", cut below {self.confidence:g}"
        return f"chain k={self.k}" + (", block rule" if self.block else "") + cut


@dataclass(frozen=True)
class Tree(Policy):
    """A dynamic tree of at most `budget` drafts and depth k (EAGLE-2, Li et al. 2406.16858).

    At each depth the `branch` likeliest nodes are expanded by their `branch` likeliest children;
    of all nodes seen the `budget` likeliest are kept, likelihood being the product along the path.
    With branch >= budget nothing is cut before that, so the kept nodes are the budget likeliest
    prefixes there are: the best-first set of DDTree, for drafters whose depths come in one pass.
    """

    block: bool = field(init=False, default=False)
    confidence: float | None = field(init=False, default=None)
    budget: int = field(kw_only=True)
    branch: int = field(kw_only=True, default=10)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.branch < 1:
            raise UserError(f"branch: {self.branch} expands nothing; use 1 or more")
        if self.budget < self.k:
            raise UserError(
                f"budget: {self.budget} nodes cannot hold a path of k={self.k}; raise it or lower k"
            )

    @property
    def sampled(self) -> bool:
        return False

    @property
    def nodes(self) -> int:
        return self.budget + 1

    @property
    def slots(self) -> int:
        return max(self.nodes, 1 + (self.k - 1) * self.branch)

    def __str__(self) -> str:
        return f"tree of {self.budget}, k={self.k}, branch {self.branch}"


@dataclass(frozen=True)
class StaticTree(Policy):
    """A tree of one shape in every round (Medusa, Cai et al. 2401.10774).

    paths: one tuple per node, its last entry the node's rank among its siblings: (0,) is the best
    token after the root, (1, 0) the best one after the second best. Every prefix of a path must be
    there too. drawn: children are drawn without replacement, in rank order, instead of ranked.
    """

    k: int = field(init=False, default=1)
    block: bool = field(init=False, default=False)
    confidence: float | None = field(init=False, default=None)
    paths: tuple[tuple[int, ...], ...]
    drawn: bool = False

    def __post_init__(self) -> None:
        given = set(self.paths)
        for path in self.paths:
            if not path or min(path) < 0:
                raise UserError(f"tree: {path} is no path; give ranks from 0, as (0,) or (1, 0)")
            if len(path) > 1 and path[:-1] not in given:
                raise UserError(f"tree: {path} hangs in the air; add {path[:-1]}")
            if self.drawn and path[-1] and (*path[:-1], path[-1] - 1) not in given:
                raise UserError(f"tree: {path} is drawn before its elder sibling; close the gap")
        if not given:
            raise UserError("tree: no paths are given; give at least (0,)")
        if len(given) != len(self.paths):
            raise UserError("tree: a path is given twice")
        ordered = tuple(sorted(self.paths, key=lambda path: (len(path), path)))
        object.__setattr__(self, "paths", ordered)
        object.__setattr__(self, "k", len(ordered[-1]))

    @classmethod
    def of_widths(cls, widths: Sequence[int], drawn: bool = False) -> StaticTree:
        """The full tree in which every node at depth j has widths[j] children."""
        ends = [range(width) for width in widths]
        paths = [path for j in range(len(ends)) for path in product(*ends[: j + 1])]
        return cls(tuple(paths), drawn)

    @property
    def sampled(self) -> bool:
        return self.drawn

    @property
    def parents(self) -> tuple[int, ...]:
        """Of nodes 0 (the root, -1), 1, .. in the order of `paths`."""
        number = {path: i for i, path in enumerate(((), *self.paths))}
        return (-1, *(number[path[:-1]] for path in self.paths))

    @property
    def nodes(self) -> int:
        return len(self.paths) + 1

    def __str__(self) -> str:
        return f"{'drawn' if self.drawn else 'static'} tree of {len(self.paths)}, k={self.k}"
