import torch
from torch import nn

from bmrs import cost
from bmrs.study import networks


def test_lenet5_by_hand():
    network = networks.lenet5(1, 10)
    # Weights and biases, layer by layer; multiply-adds are weights times output positions.
    assert cost.parameters(network) == (25 * 6 + 6) + (150 * 16 + 16) + (400 * 120 + 120) + (120 * 84 + 84) + 850
    by_hand = 150 * 28 * 28 + 2400 * 10 * 10 + 400 * 120 + 120 * 84 + 84 * 10
    assert cost.multiply_adds(network, torch.zeros(1, 1, 32, 32)) == by_hand
    assert cost.multiply_adds(network, (torch.zeros(3, 1, 32, 32),)) == 3 * by_hand


def test_shared_parameters_count_once():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    assert cost.parameters(nn.Sequential(first, second)) == 16 + 4 + 4


def test_keyword_inputs_and_mode_are_respected():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 5)

        def forward(self, x):
            return self.layer(x)

    net = Net().train()
    assert cost.multiply_adds(net, {"x": torch.zeros(2, 3)}) == 2 * 15
    assert net.training
