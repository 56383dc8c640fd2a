"""States of a training that prunes: whether one fits, before anything is changed."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from bmrs.noise import NoiseBank
from bmrs.steps import check_fits
from bmrs.structure.record import GATES, Removed, check_record, removed
from bmrs.structure.standin import as_built

VERSION = 1


def check_state(state: Mapping[str, Any], bank: NoiseBank, networks: Mapping[nn.Module, nn.Module]) -> None:
    """That a state is that of this network, its copies and its optimizers.

    ``networks``: the network and its copies, each with the network inside it that has the gates.
    """
    if not isinstance(state, Mapping) or not state.keys() >= {"version", "model", "optimizers", "copies"}:
        raise ValueError("state must be what Pruner.state_dict() returned.")
    if state["version"] != VERSION:
        raise ValueError(f"state has format {state['version']}, this version of bmrs reads {VERSION}.")
    for what, own in (("optimizers", bank.optimizers), ("copies", list(networks)[1:])):
        if len(state[what]) != len(own):
            raise ValueError(
                f"state holds {len(state[what])} {what}, the Pruner has {len(own)}: give it the same ones, in the "
                f"same order, before loading."
            )
    for optimizer, content in zip(bank.optimizers, state["optimizers"], strict=True):
        sizes = [len(group["params"]) for group in content["param_groups"]]
        if sizes != [len(group["params"]) for group in optimizer.param_groups]:
            raise ValueError(
                "state comes from an optimizer with other parameter groups: build it as it was, and the Pruner "
                "before or after its scheduler as it was."
            )
    model = next(iter(networks))
    record, extra = Removed(), f"{GATES}._extra_state"
    if extra in state["model"]:
        record = bank.record_in(state["model"][extra])
        check_record(model, record, "the state")
    for (whole, network), content in zip(networks.items(), (state["model"], *state["copies"]), strict=True):
        _check_tensors(whole, network, content, record)
    with as_built(model):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer, content in zip(bank.optimizers, state["optimizers"], strict=True):
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        saved = [number for group in content["param_groups"] for number in group["params"]]
        for parameter, number in zip(mine, saved, strict=True):
            shape = record.shape(names.get(id(parameter), ""), parameter, removed(model))
            check_fits(content["state"].get(number, {}), shape)


def _check_tensors(whole: nn.Module, network: nn.Module, content: Mapping[str, Any], record: Removed) -> None:
    """That a state dict has the names and shapes ``whole`` will have, the network inside it as the record says."""
    inside = next(f"{path}." if path else "" for path, module in whole.named_modules() if module is network)
    with as_built(network):
        present = {name: t for name, t in whole.state_dict().items() if not record.gone(name.removeprefix(inside))}
    for name in present.keys() | content.keys():
        if name not in present or name not in content:
            where = "the state" if name not in content else "the model"
            raise ValueError(f"'{name}' is missing in {where}: build the model and its Pruner as they were.")
        expected = record.shape(name.removeprefix(inside), present[name], removed(network))
        if not name.endswith("_extra_state") and tuple(content[name].shape) != expected:
            raise ValueError(
                f"state holds '{name}' with shape {tuple(content[name].shape)}, but this model's would have "
                f"{expected}: build the model as it was."
            )
