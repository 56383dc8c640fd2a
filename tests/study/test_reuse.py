"""What another command trained is not trained again, and nothing else is taken for it."""

import dataclasses

import pytest

from bmrs.study.reuse import shared
from bmrs.study.settings import Setting
from bmrs.study.store import Store, finite

RECIPE = dataclasses.asdict(Setting("made", "mlp", "digits", 32, 1e-2, (14, 10)))
MADE = {"machine": "a GPU", "commit": "abc", "date": "today"}
PRICES = (("layer", 1.0), ("uniform", 0.5))


def run(method, seed, price="layer", strength=1.0):
    return {"method": method, "seed": seed, "price": price, "strength": strength, "accuracy": seed / 10}


def leave(folder, methods, *, seeds=(0, 1), prices=PRICES[:1], form=1, protocol="continuous", recipe=RECIPE, made=MADE):
    runs = [run(m, s, *p) for m in methods for p in prices for s in seeds]
    with Store(folder / "parts", {"format": form, "protocol": protocol}) as store:
        store.finish("made", {"runs": runs, "setting": {"units": 24}, "recipe": finite(recipe), "made": made})
    return folder / "parts"


def look(folders, methods, prices=PRICES, seeds=(0, 1)):
    return shared(folders, "made", RECIPE, 1, MADE, methods, prices, seeds)


def test_the_rest_is_left(tmp_path):
    found = look([leave(tmp_path / "table1", ("none", "snr", "bmrs_n"))], ("none", "bmrs_n"))
    assert (found.methods, found.prices, found.sources) == (("bmrs_n",), (("uniform", 0.5),), ("table1",))
    assert [(r["method"], r["price"], r["seed"]) for r in found.runs] == [
        ("none", "layer", 0), ("none", "layer", 1), ("bmrs_n", "layer", 0), ("bmrs_n", "layer", 1),
    ]  # fmt: skip


def test_everything_is_there(tmp_path):
    found = look(
        [leave(tmp_path / "a", ("none",)), leave(tmp_path / "b", ("bmrs_n",), prices=PRICES)], ("none", "bmrs_n")
    )
    assert found.methods == ()
    assert found.sources == ("a", "b")
    assert len(found.runs) == 6
    assert found.setting == {"units": 24}


def test_nothing_is_there(tmp_path):
    found = look([tmp_path / "nowhere" / "parts"], ("none", "bmrs_n"))
    assert (found.methods, found.prices, found.runs) == (("none", "bmrs_n"), PRICES, ())


def test_fewer_seeds_are_taken_out_of_more_but_never_some_of_them(tmp_path):
    folder = leave(tmp_path / "a", ("none",), seeds=(0, 1, 2))
    assert {r["seed"] for r in look([folder], ("none",)).runs} == {0, 1}
    assert look([folder], ("none",), seeds=(0, 1, 2, 3)).methods == ("none",)


def test_l2_is_not_trained_without_what_it_follows(tmp_path):
    found = look([leave(tmp_path / "a", ("none", "bmrs_n"))], ("none", "l2", "bmrs_n"), prices=PRICES[:1])
    assert found.methods == ("l2", "bmrs_n")
    assert {r["method"] for r in found.runs} == {"none"}


@pytest.mark.parametrize(
    "other",
    [
        {"form": 2},
        {"protocol": "post-training"},
        {"recipe": {**RECIPE, "epochs": 3}},
        {"made": {**MADE, "machine": "another"}},
        {"made": {**MADE, "commit": "def"}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_differs_does_not_count(tmp_path, other):
    assert look([leave(tmp_path / "a", ("none",), **other)], ("none",)).methods == ("none",)


def test_damage_is_no_result(tmp_path):
    folder = leave(tmp_path / "a", ("none",))
    (folder / "made.part.json").write_text("{}")
    with pytest.warns(UserWarning, match="cannot be used"):
        assert look([folder], ("none",)).methods == ("none",)
