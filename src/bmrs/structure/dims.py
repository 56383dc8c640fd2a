"""Labels on tensor dimensions: which indices of which dimensions can only go together.

Every index of a dimension carries a label, a variable. "The index is there if its variable is alive." A variable
may be *defined* as a product of others ("head 3 and width 5"), two variables may be *united*, and a variable may
be *frozen*: it never goes. All three are global, so whatever an operation ties stays tied everywhere, and tying too
much is always sound. A dimension is either the tuple of its labels, or the reason why all of it stays.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod

Dim = tuple[int, ...] | str
"""The labels of a dimension, one per index, or the reason why it stays whole."""

# A merged dimension with more labels than this stays whole: nothing prunable is that wide.
_WIDEST = 2_000_000

_NOTHING: frozenset[int] = frozenset()


class Labels:
    """All variables of one analysis."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._factors: dict[int, tuple[int, ...]] = {}  # of the roots that are products
        self._reason: dict[int, str] = {}  # of the roots that are frozen
        self._products: dict[tuple[int, ...], int] = {}
        self._resolved: dict[int, frozenset[int]] = {}  # valid until the next change

    def fresh(self, size: int) -> tuple[int, ...]:
        """New variables, one per index."""
        first = len(self._parent)
        variables = tuple(range(first, first + size))
        self._parent.extend(variables)
        return variables

    def find(self, variable: int) -> int:
        """The variable that stands for all those united with this one."""
        parent = self._parent
        root = parent[variable]
        if parent[root] == root:
            return root
        while parent[root] != root:
            root = parent[root]
        while parent[variable] != root:
            parent[variable], variable = root, parent[variable]
        return root

    def resolve(self, variable: int) -> frozenset[int]:
        """The free variables an index with this label depends on; empty if it always stays."""
        root = self.find(variable)
        if root in self._reason:
            return _NOTHING
        known = self._resolved.get(root)
        if known is None:
            if root in self._factors:
                known = frozenset().union(*(self.resolve(factor) for factor in self._factors[root]))
            else:
                known = frozenset((root,))
            self._resolved[root] = known
        return known

    def resolve_all(self, dim: Iterable[int]) -> list[frozenset[int]]:
        """Of a dimension's labels."""
        frozen, known, resolve = self._reason, self._resolved, self.resolve
        return [
            _NOTHING if root in frozen else known[root] if root in known else resolve(root)
            for root in map(self.find, dim)
        ]

    def reason(self, variable: int) -> str | None:
        """Why this label is frozen; None if it, or a factor of it, is free."""
        root = self.find(variable)
        if root in self._reason:
            return self._reason[root]
        if root in self._factors and not self.resolve(root):
            return next(filter(None, (self.reason(factor) for factor in self._factors[root])), None)
        return None

    def freeze(self, dim: Dim, reason: str) -> str:
        """Keep all of a dimension, and say why."""
        if isinstance(dim, str):
            return dim
        roots = dict.fromkeys(map(self.find, dim))
        self._reason |= {root: reason for root in roots if root not in self._factors and root not in self._reason}
        self._resolved.clear()
        for root in roots:
            if root in self._factors:
                for free in self.resolve(root):
                    self._freeze(free, reason)
        return reason

    def _freeze(self, free: int, reason: str) -> None:
        self._reason[free] = reason
        self._resolved.clear()

    def unify(self, first: Dim, second: Dim) -> Dim:
        """Tie two dimensions of the same size, index by index."""
        if first is second or first == second:
            return first
        if isinstance(first, str):
            return self.freeze(second, first)
        if isinstance(second, str):
            return self.freeze(first, second)
        if len(first) != len(second):
            raise AssertionError(f"dimensions of size {len(first)} and {len(second)} cannot be tied")
        pairs = dict.fromkeys(zip(map(self.find, first), map(self.find, second), strict=True))
        composite = self._unify_pairs(pairs)
        if composite:
            self._unify_products(composite)
        return first

    def unify_all(self, dims: Iterable[Dim]) -> Dim:
        result: Dim | None = None
        for dim in dims:
            result = dim if result is None else self.unify(result, dim)
        assert result is not None
        return result

    def _unify_pairs(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Tie labels, and return the pairs of products; most are variables, millions of them in a large network."""
        parent, factors, frozen = self._parent, self._factors, self._reason
        composite, stale = [], False
        for pair in pairs:
            a, b = self.find(pair[0]), self.find(pair[1])  # which a pair before this one may have united
            if a == b:
                continue
            if a in factors or b in factors:
                if stale:
                    self._resolved.clear()
                stale = False
                if not self._unify_simple(a, b):
                    composite.append((a, b))
                continue
            stale = True
            if a in frozen:
                frozen.setdefault(b, frozen[a])
            elif b in frozen:
                frozen[a] = frozen[b]
            else:
                parent[a] = b
        if stale:
            self._resolved.clear()
        return composite

    def _unify_simple(self, a: int, b: int) -> bool:
        """Tie two labels where one of them, less what both share, is at most a single variable."""
        left, right = self.resolve(a), self.resolve(b)
        if left == right:
            return True
        left, right = left - right, right - left
        if not left or not right:
            reason = self.reason(a) or self.reason(b) or "tied to a dimension of which it is only a factor"
            for free in left | right:
                self._freeze(free, reason)
            return True
        if len(left) > 1 and len(right) > 1:
            return False
        if len(left) > 1:
            left, right = right, left
        (variable,) = left
        if len(right) == 1:
            (other,) = right
            self._parent[variable] = other
        else:
            self._factors[variable] = tuple(sorted(right))
        self._resolved.clear()
        return True

    def _unify_products(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Tie products by where their factors occur: p·q meets r·s, and p stands where r does."""
        places: tuple[dict[int, list[int]], dict[int, list[int]]] = (defaultdict(list), defaultdict(list))
        for place, (a, b) in enumerate(pairs):
            left, right = self.resolve(a), self.resolve(b)
            for free in left - right:
                places[0][free].append(place)
            for free in right - left:
                places[1][free].append(place)
        by_place: dict[tuple[int, ...], list[list[int]]] = defaultdict(lambda: [[], []])
        for side in (0, 1):
            for free, where in places[side].items():
                by_place[tuple(where)][side].append(free)
        for lefts, rights in by_place.values():
            for a, b in zip(lefts, rights, strict=False):
                if self.find(a) != self.find(b):
                    self._parent[self.find(a)] = self.find(b)
        self._resolved.clear()
        for a, b in pairs:
            for free in self.resolve(a) ^ self.resolve(b):
                self._freeze(free, "tied to a dimension that is divided in another way")

    def merge(self, dims: Sequence[Dim], sizes: Sequence[int]) -> Dim:
        """Several neighbouring dimensions as one, the last running fastest."""
        labelled = [dim for dim in dims if not isinstance(dim, str)]
        if not labelled:
            return next((dim for dim in dims if isinstance(dim, str)), "a dimension of size 1")
        if prod(sizes) > _WIDEST:
            for known in labelled:
                self.freeze(known, "merged with too many other indices")
            return "merged with too many other indices"
        result: tuple[int, ...] | None = None
        before = 1  # frozen indices that run slower
        for dim, size in zip(dims, sizes, strict=True):
            if isinstance(dim, str):
                if result is None:
                    before *= size
                else:
                    result = tuple(label for label in result for _ in range(size))
            elif result is None:
                result = dim * before
            else:
                result = tuple(self._product(a, b) for a in result for b in dim)
        assert result is not None
        return result

    def _product(self, a: int, b: int) -> int:
        a, b = self.find(a), self.find(b)
        if a == b:
            return a
        key = (a, b) if a < b else (b, a)
        if key not in self._products:
            (product,) = self.fresh(1)
            self._factors[product] = key
            self._products[key] = product
        return self._products[key]

    def split(self, dim: Dim, sizes: Sequence[int]) -> list[Dim]:
        """One dimension as several, the last running fastest."""
        if isinstance(dim, str):
            return [dim] * len(sizes)
        if len(sizes) == 1:
            return [dim]
        outer, inner = sizes[0], prod(sizes[1:])
        slow, fast = self._split_in_two(dim, outer, inner)
        return [slow, *self.split(fast, sizes[1:])]

    def _split_in_two(self, dim: tuple[int, ...], outer: int, inner: int) -> tuple[Dim, Dim]:
        one = "a dimension of size 1"
        if outer == 1:
            return one, dim
        if inner == 1:
            return dim, one
        rows = [dim[i * inner : (i + 1) * inner] for i in range(outer)]
        known = [[self.resolve(label) for label in row] for row in rows]
        slow = [frozenset.intersection(*row) for row in known]
        fast = [frozenset.intersection(*(row[j] for row in known)) for j in range(inner)]
        if all(known[i][j] == slow[i] | fast[j] for i in range(outer) for j in range(inner)):
            everywhere = frozenset.intersection(*slow)
            return self._dim(slow), self._dim([factors - everywhere for factors in fast])
        p, q = self.fresh(outer), self.fresh(inner)
        self.unify(dim, tuple(self._product(a, b) for a in p for b in q))
        return p, q

    def _dim(self, labels: Sequence[frozenset[int]]) -> Dim:
        if not any(labels):
            return "an axis along which nothing can be told apart"
        return tuple(self.of(factors) for factors in labels)

    def of(self, factors: frozenset[int]) -> int:
        """The label that is the product of these variables."""
        if not factors:
            return self._always
        result, *rest = sorted(factors)
        for factor in rest:
            result = self._product(result, factor)
        return result

    @property
    def _always(self) -> int:
        if () not in self._products:
            (label,) = self.fresh(1)
            self._reason[label] = "an axis along which nothing can be told apart"
            self._products[()] = label
        return self._products[()]
