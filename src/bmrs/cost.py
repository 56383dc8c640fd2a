"""What a network costs: parameters and multiply-adds."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

ExampleInputs = Tensor | tuple[Any, ...] | Mapping[str, Any]


def parameters(model: nn.Module) -> int:
    """Numbers the network holds in parameters; shared ones count once."""
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def multiply_adds(model: nn.Module, example_inputs: ExampleInputs) -> int:
    """Multiply-adds of matrix products, convolutions and attention in one forward pass on these inputs.

    ``example_inputs``: a tensor, a tuple (positional) or a mapping (keyword).
    """
    training = model.training
    model.eval()
    try:
        with FlopCounterMode(display=False) as counter:
            if isinstance(example_inputs, Mapping):
                model(**example_inputs)
            else:
                model(*(example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)))
    finally:
        model.train(training)
    return int(counter.get_total_flops()) // 2
