"""Every rule by brute force: what is listed can go, removed equals masked, and what cannot go says why."""

import copy
import warnings
from functools import cache
from itertools import combinations

import pytest
import torch
from torch.utils import _pytree

import bmrs
from bmrs.structure.capture import named_tensors
from tests.structure.networks import CASES, without_rules

EXACT = 1e-10
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@cache
def listed(name):
    (case,) = [case for case in CASES if case.name == name]
    return bmrs.structures(case.model, case.inputs)


def all_of(structures):
    return [*structures, *structures.hidden]


def some_units(structure, seed):
    """At least one, not all."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, structure.units, (), generator=generator))
    return torch.randperm(structure.units, generator=generator)[:count].tolist()


def fill(model, structure, place, units, value):
    """Put numbers at all indices that units have along a dimension of a parameter."""
    name, dim = place
    tensor = dict(named_tensors(model))[name]
    at = torch.tensor([index for unit in units for index in structure.indices(place)[unit]])
    if tensor.is_floating_point():
        tensor.data = tensor.data.index_copy(dim, at, value(tensor.data.index_select(dim, at)))


def masked(case, chosen):
    """A copy in which nothing takes up what these units produce."""
    model = copy.deepcopy(case.model)
    for structure, units in chosen.items():
        for place in structure.consumers:
            fill(model, structure, place, units, torch.zeros_like)
    return model


def outputs(model, inputs):
    """All tensors it computes, in evaluation and as it trains."""
    made = []
    for training in (False, True):
        with torch.no_grad():
            made += _pytree.tree_leaves(copy.deepcopy(model).train(training)(*inputs))
    return made


def same(first, second):
    return len(first) == len(second) and all(
        a.shape == b.shape and float((a - b).abs().max()) < EXACT * float(a.abs().max().clamp_min(1))
        for a, b in zip(first, second, strict=True)
    )


def selections(structures, seed=0):
    """Units of every structure by itself, then of all together."""
    chosen = {structure: some_units(structure, seed + n) for n, structure in enumerate(all_of(structures))}
    single = [{structure: units} for structure, units in chosen.items()]
    return [*single, chosen] if len(chosen) > 1 else single


@every_case
def test_the_units_found_are_those_there_are(case):
    structures = listed(case.name)
    assert sorted(structure.units for structure in structures) == case.units
    reasons = {place: reason for reason, places in structures.frozen.items() for place in places}
    for place, reason in case.stays.items():
        assert reason in reasons[place]


@every_case
def test_nothing_feels_what_is_in_a_masked_unit(case):
    for chosen in selections(listed(case.name)):
        model = masked(case, chosen)
        expected = outputs(model, case.inputs)
        assert not same(expected, outputs(case.model, case.inputs))  # or the test would show nothing
        for structure, units in chosen.items():
            for place in set(structure.places) - set(structure.consumers):
                fill(model, structure, place, units, lambda old: torch.rand_like(old) + 0.5)
        assert same(outputs(model, case.inputs), expected)


def removed(case, chosen):
    """A copy without these units; and the structures that stayed, with a warning or an error."""
    structures = copy.deepcopy(listed(case.name))
    model, own = structures.model, {structure.name: structure for structure in all_of(structures)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is left alone: kept: ")
        try:
            bmrs.remove(model, {own[structure.name]: units for structure, units in chosen.items()})
        except RuntimeError as refused:
            if "nothing was removed" not in str(refused):
                raise
            return model, set(chosen)
    return model, {structure for structure in chosen if own[structure.name].status != "exact"}


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@every_case
def test_removed_equals_masked(case):
    for chosen in selections(listed(case.name)):
        model, stayed = removed(case, chosen)
        gone = {structure: units for structure, units in chosen.items() if structure not in stayed}
        assert same(outputs(model, case.inputs), outputs(masked(case, gone), case.inputs))
        assert parameters(model) < parameters(case.model) if gone else parameters(model) == parameters(case.model)
        if len(chosen) == 1 and not case.some:  # together they may ask too much of the code; alone it is known
            (structure,) = chosen
            assert structure.hidden or (structure in stayed) == (structure.units in case.kept)


@pytest.mark.parametrize("case", [case for case in CASES if case.some], ids=lambda case: case.name)
def test_where_literals_let_only_some_units_go_no_others_do(case):
    (structure,) = listed(case.name)
    units = range(structure.units)
    for chosen in (c for count in (1, 2) for c in combinations(units, count) if c[0] < 2):
        model, stayed = removed(case, {structure: chosen})
        assert same(
            outputs(model, case.inputs), outputs(masked(case, {} if stayed else {structure: chosen}), case.inputs)
        )


@pytest.mark.parametrize("case", list(without_rules()), ids=lambda case: case.name)
def test_an_operation_without_a_rule_is_named(case):
    assert bmrs.structures(case.model, case.inputs).findings.unknown


def test_tied_weights_are_not_folded():
    (structure,) = listed("a tied embedding")
    assert not structure.foldable
    assert all(structure.foldable for name in ("relu", "flatten", "one layer twice") for structure in listed(name))
