"""What may go from a network, proved before anything is done with it."""

from rich.console import Console
from torch import nn

import bmrs
from bmrs import chance
from bmrs.structure import ExampleInputs


def proved(network: nn.Module, examples: ExampleInputs) -> list[bmrs.Structure]:
    """The structures of a network, with their proof; refuses one that has none."""
    with Console(stderr=True, quiet=chance.rank() > 0).status("proving that removal is exact ..."):
        found = bmrs.structures(network, examples).verify()
    if not any(structure.status == "exact" for structure in found):
        if not all(tensor.isfinite().all() for tensor in network.state_dict().values()):
            raise ValueError("the network's weights hold NaN or infinite numbers, so nothing can be proved: mend them.")
        raise ValueError("nothing can be removed from this network:  bmrs inspect  says why.")
    return list(found)
