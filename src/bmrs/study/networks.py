"""The study's small networks, as plain chains of layers."""

from collections import OrderedDict

from torch import nn

NAMES = ("lenet5", "mlp")


def build(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """The network of that name for images of this shape (channels, height, width)."""
    if name not in NAMES:
        raise ValueError(f"unknown network '{name}': choose one of {', '.join(NAMES)}.")
    channels, height, width = input_shape
    if name == "mlp":
        return mlp(channels * height * width, classes)
    if (height, width) != (32, 32):
        raise ValueError(f"lenet5 takes 32×32 images; got {height}×{width}: resize them first.")
    return lenet5(channels, classes)


def lenet5(channels: int, classes: int) -> nn.Sequential:
    """LeNet-5 on 32×32 images; every width grows with the number of input channels."""
    first, second, third, fourth = (channels * width for width in (6, 16, 120, 84))
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, first, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(first, second, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(second * 25, third),
            relu3=nn.ReLU(),
            fc2=nn.Linear(third, fourth),
            relu4=nn.ReLU(),
            out=nn.Linear(fourth, classes),
        )
    )


def mlp(inputs: int, classes: int, hidden: tuple[int, ...] = (100, 100)) -> nn.Sequential:
    """Linear and tanh, repeated, then a linear read-out."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for index, width in enumerate(hidden, start=1):
        layers[f"fc{index}"] = nn.Linear(inputs, width)
        layers[f"tanh{index}"] = nn.Tanh()
        inputs = width
    layers["out"] = nn.Linear(inputs, classes)
    return nn.Sequential(layers)
