import random
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmrs.structure.dims import Labels

SIZES = st.integers(2, 5)


def meaning(labels, dim):
    """What every index of a dimension depends on; nothing, where it stays."""
    return [labels.resolve(label) for label in dim]


def tied(labels, *dims):
    return all(meaning(labels, dims[0]) == meaning(labels, dim) for dim in dims[1:])


def free(labels, *dims):
    """The free variables of some dimensions."""
    return frozenset().union(*(known for dim in dims if not isinstance(dim, str) for known in meaning(labels, dim)))


class TestUnify:
    @settings(deadline=None)
    @given(SIZES)
    def test_fresh_dimensions_share_nothing(self, size):
        labels = Labels()
        a, b = labels.fresh(size), labels.fresh(size)
        assert len(free(labels, a)) == len(free(labels, b)) == size
        assert not free(labels, a) & free(labels, b)

    @settings(deadline=None)
    @given(SIZES, st.booleans())
    def test_the_order_of_the_two_does_not_matter(self, size, turned):
        labels = Labels()
        a, b = labels.fresh(size), labels.fresh(size)
        labels.unify(*((b, a) if turned else (a, b)))
        assert tied(labels, a, b)
        assert len(free(labels, a)) == size

    @settings(deadline=None)
    @given(SIZES, st.integers(2, 4))
    def test_twice_is_once(self, size, inner):
        labels = Labels()
        a, b = labels.fresh(size * inner), labels.merge([labels.fresh(size), labels.fresh(inner)], [size, inner])
        labels.unify(a, b)
        before = meaning(labels, a)
        for first, second in ((a, b), (b, a), (a, a)):
            labels.unify(first, second)
            assert meaning(labels, a) == meaning(labels, b) == before

    @settings(deadline=None)
    @given(SIZES)
    def test_it_holds_for_all_who_were_tied_before_and_after(self, size):
        labels = Labels()
        a, b, c, d = (labels.fresh(size) for _ in range(4))
        labels.unify(a, b)
        labels.unify(c, d)
        labels.unify(b, c)
        assert tied(labels, a, b, c, d)
        assert len(free(labels, a, b, c, d)) == size

    def test_a_repeated_label_ties_all_it_meets(self):
        labels = Labels()
        (a,), b = labels.fresh(1), labels.fresh(3)
        labels.unify((a, a, a), b)
        assert len(free(labels, b)) == 1

    def test_dimensions_of_other_sizes_cannot_be_tied(self):
        labels = Labels()
        with pytest.raises(AssertionError, match="size 2 and 3"):
            labels.unify(labels.fresh(2), labels.fresh(3))

    def test_a_label_tied_to_its_own_product_stays(self):
        labels = Labels()
        p, q = labels.fresh(2), labels.fresh(2)
        labels.unify((p[0], p[0], p[1], p[1]), labels.merge([p, q], [2, 2]))
        assert len(free(labels, p)) == 2
        assert not free(labels, q)
        assert labels.reason(q[0]) == "tied to a dimension of which it is only a factor"


class TestFrozen:
    @settings(deadline=None)
    @given(SIZES, st.booleans(), st.booleans())
    def test_it_spreads_with_its_reason_whenever_it_comes(self, size, turned, before):
        labels = Labels()
        a, b, c = (labels.fresh(size) for _ in range(3))
        if before:
            labels.freeze(b, "a reason")
        labels.unify(a, b)
        labels.unify(*((c, a) if turned else (a, c)))
        if not before:
            labels.freeze(b, "a reason")
        assert not free(labels, a, b, c)
        assert {labels.reason(label) for label in (*a, *b, *c)} == {"a reason"}

    def test_a_dimension_that_stays_keeps_what_meets_it(self):
        labels = Labels()
        a, b = labels.fresh(2), labels.fresh(2)
        assert labels.unify("a reason", a) == "a reason"
        assert labels.unify(b, "another") == "another"
        assert [labels.reason(a[0]), labels.reason(b[0])] == ["a reason", "another"]

    def test_the_first_reason_stays(self):
        labels = Labels()
        a = labels.fresh(2)
        labels.freeze(a, "first")
        labels.freeze(a, "second")
        assert labels.freeze("whole", "third") == "whole"
        assert labels.reason(a[0]) == "first"

    def test_only_the_indices_met_are_frozen(self):
        labels = Labels()
        a = labels.fresh(4)
        labels.freeze(a[1:3], "a part")
        assert [bool(known) for known in meaning(labels, a)] == [True, False, False, True]
        assert [labels.reason(label) for label in a] == [None, "a part", "a part", None]

    def test_a_product_with_one_frozen_factor_is_the_other(self):
        labels = Labels()
        p, q = labels.fresh(2), labels.fresh(3)
        both = labels.merge([p, q], [2, 3])
        labels.freeze(q, "a reason")
        assert meaning(labels, both) == [known for known in meaning(labels, p) for _ in range(3)]
        assert labels.reason(both[0]) is None
        labels.freeze(p, "another")
        assert labels.reason(both[0]) in ("a reason", "another")


class TestMergeAndSplit:
    @settings(deadline=None)
    @given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    def test_splitting_gives_back_what_was_merged(self, sizes):
        labels = Labels()
        dims = [labels.fresh(size) if size > 1 else "a dimension of size 1" for size in sizes]
        merged = labels.merge(dims, sizes)
        assert isinstance(merged, str) or len(merged) == prod(sizes)
        before = [dim if isinstance(dim, str) else meaning(labels, dim) for dim in dims]
        again = [dim if isinstance(dim, str) else meaning(labels, dim) for dim in labels.split(merged, sizes)]
        assert again == before

    @settings(deadline=None)
    @given(st.lists(SIZES, min_size=2, max_size=3))
    def test_distinct_labels_split_into_products(self, sizes):
        labels = Labels()
        dim = labels.fresh(prod(sizes))
        parts = labels.split(dim, sizes)
        assert [len(free(labels, part)) for part in parts] == sizes
        assert len(free(labels, dim)) == sum(sizes)
        for index, place in zip(dim, product(*map(range, sizes)), strict=True):
            factors = [labels.resolve(part[at]) for part, at in zip(parts, place, strict=True)]
            assert labels.resolve(index) == frozenset().union(*factors)

    @settings(deadline=None)
    @given(SIZES, SIZES)
    def test_labels_that_vary_along_one_axis_are_told_apart_along_that_axis_alone(self, outer, inner):
        labels = Labels()
        p = labels.fresh(outer)
        slow, fast = labels.split(labels.merge([p, "whole"], [outer, inner]), [outer, inner])
        assert tied(labels, slow, p)
        assert isinstance(fast, str)
        slow, fast = labels.split(labels.merge(["whole", p], [inner, outer]), [inner, outer])
        assert tied(labels, fast, p)
        assert isinstance(slow, str)

    def test_merged_with_what_stays_an_index_is_repeated(self):
        labels = Labels()
        p = labels.fresh(2)
        assert labels.merge(["whole", p, "whole"], [2, 2, 3]) == (*[p[0]] * 3, *[p[1]] * 3) * 2
        assert labels.merge(["first", "second"], [2, 3]) == "first"

    def test_products_that_meet_are_tied_factor_by_factor(self):
        heads, width = 3, 2
        labels = Labels()
        query, key = labels.fresh(heads * width), labels.fresh(heads * width)
        (h, w), (i, v) = labels.split(query, [heads, width]), labels.split(key, [heads, width])
        labels.unify(query, key)
        assert tied(labels, h, i)
        assert tied(labels, w, v)
        assert len(free(labels, query, key)) == heads + width

    @settings(deadline=None)
    @given(SIZES, SIZES)
    def test_a_plain_dimension_takes_the_product_it_meets(self, heads, width):
        labels = Labels()
        plain = labels.fresh(heads * width)
        p, q = labels.fresh(heads), labels.fresh(width)
        labels.unify(plain, labels.merge([p, q], [heads, width]))
        assert free(labels, plain) == free(labels, p, q)
        slow, fast = labels.split(plain, [heads, width])
        assert tied(labels, slow, p)
        assert tied(labels, fast, q)

    def test_a_dimension_divided_in_two_ways_stays(self):
        labels = Labels()
        dim, other = labels.fresh(12), labels.fresh(12)
        labels.split(dim, [3, 4])
        labels.split(other, [2, 6])
        labels.unify(dim, other)
        assert not free(labels, dim, other)
        assert labels.reason(dim[0]) == "tied to a dimension that is divided in another way"

    def test_too_many_indices_stay(self):
        labels = Labels()
        dims = [labels.fresh(2000), labels.fresh(2000)]
        assert labels.merge(dims, [2000, 2000]) == "merged with too many other indices"
        assert not free(labels, *dims)


class Recorder:
    """Random operations on a pool of dimensions, with everything they demand written down."""

    def __init__(self, random):
        self.random, self.labels = random, Labels()
        self.pool = []
        self.same, self.products, self.stays = [], [], []  # demands, index by index; None is an index that stays

    def add(self, dim, size):
        self.pool.append((dim, size))
        return self.indices(dim, size)

    @staticmethod
    def indices(dim, size):
        return [None] * size if isinstance(dim, str) else list(dim)

    def fresh(self):
        size = self.random.choice([2, 3, 4, 6])
        self.add(self.labels.fresh(size), size)

    def unify(self):
        first, size = self.random.choice(self.pool)
        second = self.random.choice([dim for dim, other in self.pool if other == size])
        made = self.labels.unify(first, second)
        three = [self.indices(dim, size) for dim in (first, second, made)]
        self.same += [pair for other in three[1:] for pair in zip(three[0], other, strict=True)]

    def freeze(self):
        dim, size = self.random.choice(self.pool)
        if isinstance(dim, str):
            return
        first = self.random.randrange(size)
        part = dim[first : first + self.random.randint(1, 2)]
        self.labels.freeze(part, "a reason")
        self.stays += part

    def merge(self):
        chosen = [self.random.choice(self.pool) for _ in range(self.random.choice([2, 2, 3]))]
        dims, sizes = zip(*chosen, strict=True)
        if prod(sizes) <= 24:
            made = self.add(self.labels.merge(dims, sizes), prod(sizes))
            self.demand_products(made, [self.indices(*one) for one in chosen])

    def split(self):
        dim, size = self.random.choice(self.pool)
        ways = [(n, size // n) for n in range(2, size) if size % n == 0]
        ways += [(2, 2, size // 4)] if size % 4 == 0 and size > 4 else []
        if ways:
            sizes = self.random.choice(ways)
            parts = self.labels.split(dim, sizes)
            self.demand_products(self.indices(dim, size), [self.add(*one) for one in zip(parts, sizes, strict=True)])

    def part(self):
        dim, size = self.random.choice(self.pool)
        if not isinstance(dim, str) and size > 2:
            self.add(dim[1:], size - 1)

    def demand_products(self, whole, factors):
        self.products += zip(whole, product(*factors), strict=True)

    def violations(self, there):
        """The demands that do not hold when only these variables are alive."""
        alive = lambda label: label is None or self.labels.resolve(label) <= there  # noqa: E731
        yield from (pair for pair in self.same if alive(pair[0]) != alive(pair[1]))
        yield from (one for one in self.products if alive(one[0]) != all(map(alive, one[1])))
        yield from (label for label in self.stays if not alive(label))


def assignments(variables, random, most=256):
    """Every way to have some of the variables; a sample of them where there are too many."""
    if 2 ** len(variables) <= most:
        choices = product([True, False], repeat=len(variables))
    else:
        choices = ([random.random() < share for _ in variables] for share in [0.2, 0.5, 0.8, 0.95] * (most // 4))
    for choice in choices:
        yield frozenset(variable for variable, kept in zip(variables, choice, strict=True) if kept)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 20))
def test_whatever_is_left_free_can_go_without_breaking_any_demand(seed, operations):
    recorder = Recorder(random.Random(seed))
    for _ in range(3):
        recorder.fresh()
    for _ in range(operations):
        kinds = ["fresh", *["unify"] * 3, *["merge"] * 2, *["split"] * 3, "freeze", "part"]
        getattr(recorder, recorder.random.choice(kinds))()
    variables = sorted(free(recorder.labels, *(dim for dim, _ in recorder.pool)))
    for there in assignments(variables, recorder.random):
        assert not list(recorder.violations(there))
    labels = recorder.labels
    every = {label for dim, _ in recorder.pool if not isinstance(dim, str) for label in dim}
    assert all(bool(labels.resolve(label)) != bool(labels.reason(label)) for label in every)  # what stays says why
