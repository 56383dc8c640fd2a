"""Which structures of a network get gates."""

from bmrs import Structure, Structures


def gated(listing: Structures, where: str) -> list[Structure]:
    """``"paper"``: every batch norm of a ResNet, so its inner channels and the rows of its branches; the rows of a
    ViT's branches, which are its output projections. ``"all"``: whatever makes the network narrower or shorter, which
    adds what branches are summed into, heads and whole blocks, and leaves out the rows.
    """
    if where == "all":
        return [*listing, *getattr(listing, "blocks", ())]
    if not listing.branches:
        raise ValueError("--gates paper: the network has no residual branches to put gates on: choose --gates all.")
    rows = {place for branch in listing.branches for place in branch.places}
    convolutional = any(branch.kind == "filter" for branch in listing.branches)
    inner = [s for s in listing if convolutional and rows.isdisjoint(s.places)]
    return [*inner, *listing.branches]
