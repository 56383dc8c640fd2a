"""Which structures of a network get gates."""

import re

from bmrs import Structure, Structures

_COMMON = re.compile(r"^(vit\.layers|vit\.encoder\.layer|resnet\.encoder\.stages|resnet\.embedder)\.")


def gated(listing: Structures, where: str) -> list[Structure]:
    """``"paper"``: every batch norm of a ResNet, so its inner channels and the rows of its branches; the rows of a
    ViT's branches, which are its output projections. ``"all"``: whatever makes the network narrower or shorter, which
    adds what branches are summed into, heads and whole blocks, and leaves out the rows.
    """
    if where == "all":
        wanted = {*listing, *listing.blocks}
        return [structure for structure in listing.everything if structure in wanted]
    if not listing.branches:
        raise ValueError("--gates paper: the network has no residual branches to put gates on: choose --gates all.")
    rows = {place for branch in listing.branches for place in branch.places}
    convolutional = any(branch.kind == "filter" for branch in listing.branches)
    chosen = {*listing.branches, *(s for s in listing if convolutional and rows.isdisjoint(s.places))}
    return [structure for structure in listing.everything if structure in chosen]  # as they follow in the network


def short(name: str) -> str:
    """A structure's name without what all have in common.

    >>> short("resnet.encoder.stages.0.layers.2.layer.1.convolution"), short("vit.layers.3.mlp.fc1")
    ('0.2.layer.1.convolution', '3.mlp.fc1')
    """
    return _COMMON.sub("", name).replace(".layers.", ".", 1)
