"""What a network costs: parameters and multiply-adds."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bmrs.structure.capture import ExampleInputs, arguments, mode


def parameters(model: nn.Module) -> int:
    """Numbers the network holds in parameters; shared ones count once."""
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def multiply_adds(model: nn.Module, example_inputs: ExampleInputs) -> int:
    """Multiply-adds of matrix products, convolutions and attention in one forward pass on these inputs.

    ``example_inputs``: a tensor, a tuple (positional) or a mapping (keyword).
    """
    args, kwargs = arguments(example_inputs)
    with mode(model, training=False), FlopCounterMode(display=False) as counter:
        model(*args, **kwargs)
    return int(counter.get_total_flops()) // 2
