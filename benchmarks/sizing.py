"""What pruning a large decoder takes, as arithmetic: bytes, bytes on the wire and seconds from sizes and constants.

P parameters, U units, C gated columns, N GPUs, B sequences of T tokens on each. Numbers are bytes and seconds.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Decoder:
    """Layers of grouped-query attention and a gated MLP, as in Llama 3 and Qwen3."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int
    head_dim: int
    vocabulary: int
    head_norms: bool = False  # Qwen3's, of queries and keys

    @property
    def per_neuron(self) -> int:
        """Parameters of a neuron: its rows of gate_proj and up_proj, its column of down_proj."""
        return 3 * self.hidden

    @property
    def per_group(self) -> int:
        """Of a key-value group: one key, one value, and a query and an output for each of its heads."""
        return self.hidden * self.head_dim * (2 + 2 * self.heads // self.groups)

    @property
    def layer(self) -> int:
        norms = 2 * self.hidden + 2 * self.head_dim * self.head_norms
        return self.intermediate * self.per_neuron + self.groups * self.per_group + norms

    @property
    def parameters(self) -> int:
        """P, with an embedding and an output layer of their own, and the last norm."""
        return self.layers * self.layer + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def removable(self) -> int:
        return self.layers * (self.intermediate * self.per_neuron + self.groups * self.per_group)

    @property
    def units(self) -> int:
        """U."""
        return self.layers * (self.intermediate + self.groups)

    @property
    def columns(self) -> int:
        """C: the columns of down_proj and o_proj, whose inputs the gates multiply."""
        return self.layers * (self.intermediate + self.heads * self.head_dim)


@dataclass(frozen=True)
class Machine:
    """Nodes of 8 GPUs: what the makers publish, and the share of the peak that training is assumed to reach."""

    memory: float = 141e9  # of an H200
    peak: float = 989e12  # operations a second in bf16
    bandwidth: float = 4.8e12  # of its memory
    inside: float = 450e9  # NVLink, each way, per GPU
    between: float = 50e9  # 400 Gb/s for each GPU, from node to node
    utilisation: float = 0.4  # of the peak, in training
    gpus: int = 8

    def wire(self, gpus: int) -> float:
        """Bytes a second a GPU receives from the others."""
        return self.inside if gpus <= self.gpus else self.between


@dataclass(frozen=True)
class Run:
    """How it is trained: FSDP2 over all GPUs, bf16 with float32 weights and Adam, activations of a layer recomputed."""

    gpus: int
    sequences: int = 2
    length: int = 4096
    per_example: bool = True  # one draw per sequence; else one per GPU and step

    @property
    def tokens(self) -> int:
        """On one GPU, in a step."""
        return self.sequences * self.length

    @property
    def rows(self) -> int:
        """Draws of every gate on one GPU, in a step."""
        return self.sequences if self.per_example else 1


@dataclass(frozen=True)
class Constants:
    """Measured: seconds and bytes per unit and row (draw), or per unit. Seconds are a GPU's."""

    draw: float  # forward and backward, computed from bytes
    draw_peak: float  # bytes at the worst moment
    kl: float  # its gradient, computed from bytes
    scores: float
    record: float  # bytes of the record of what was removed
    indices: float  # seconds of Python, on one core


def memory(decoder: Decoder, run: Run, constants: Constants) -> dict[str, float]:
    """Of one GPU while it trains."""
    p, u = decoder.parameters, decoder.units
    largest = max(decoder.layer, decoder.vocabulary * decoder.hidden)
    inside = 4 * decoder.hidden + 2 * (decoder.heads + decoder.groups) * decoder.head_dim + 4 * decoder.intermediate
    return {
        "weights, gradients and Adam in float32, in shards: 16 P / N": 16 * p / run.gpus,
        "two parts gathered in bf16, one computed with, one on its way: 4 max(layer, embedding)": 4 * largest,
        "inputs of the layers in bf16: 2 B T hidden layers": 2 * run.tokens * decoder.hidden * decoder.layers,
        "activations of one layer in bf16, about": 2 * run.tokens * inside,
        "logits in bf16 and float32, and their gradient: 10 B T vocabulary": 10 * run.tokens * decoder.vocabulary,
        "gates: φ, gradient and Adam in float32, on every GPU: 32 U": 32 * u,
        "gates: draws at their peak": constants.draw_peak * run.rows * u,
        "gates: a second copy of the inputs of one layer's consumers: 2 B T C / layers": (
            2 * run.tokens * decoder.columns / decoder.layers
        ),
    }


def step(decoder: Decoder, run: Run, constants: Constants, machine: Machine) -> dict[str, float]:
    """Seconds of one training step, were nothing done at once. 8 P B T: forward, forward again, and backward.

    Of a gated column, in bf16: read and written forward, twice, 8 bytes; backward, in one kernel, the column and what
    comes back read and its own gradient written, 6.
    """
    p, u, n = decoder.parameters, decoder.units, run.gpus
    return {
        "the network: 8 P B T operations": 8 * p * run.tokens / (machine.peak * machine.utilisation),
        "FSDP: parameters gathered twice, gradients scattered, in bf16: 6 P (N−1)/N": (
            6 * p * (n - 1) / n / machine.wire(n)
        ),
        "gates: draw and its backward pass: 32 bytes per unit and row": constants.draw * run.rows * u,
        "gates: the gradient of the KL: 44 U bytes": constants.kl * u,
        "gates: multiplying, twice forward and once backward: 14 B T C bytes": (
            14 * run.tokens * decoder.columns / machine.bandwidth
        ),
        "gates: averaging φ's gradient: 16 U (N−1)/N bytes": 16 * u * (n - 1) / n / machine.wire(n),
    }


def least_steps(learning_rate: float, phi_lr: float) -> float:
    """Before a gate can have let go: its log σ must rise by 7.5, about the rate of φ at every step."""
    return 8 / (learning_rate * phi_lr)


def prune_memory(decoder: Decoder) -> dict[str, float]:
    """Of each process, where the network is gathered."""
    p = decoder.parameters
    return {
        "the proof, when the Pruner is made: the network in float32 and a copy in float64, 12 P": 12 * p,
        "every prune: the network and a copy, both in float32, 8 P": 8 * p,
        "its gradients too, if they were not set to None: 4 P more": 12 * p,
    }


def prune(decoder: Decoder, run: Run, constants: Constants, machine: Machine) -> dict[str, float]:
    """Seconds of one prune, the network gathered on the GPUs."""
    p, u, n = decoder.parameters, decoder.units, run.gpus
    return {
        "gathering weights and Adam's state: 12 P (N−1)/N bytes": 12 * p * (n - 1) / n / machine.wire(n),
        "checksum that all are alike: 40 P bytes read and written": 40 * p / machine.bandwidth,
        "ΔF of all units": constants.scores * u,
        "which indices go, in Python": constants.indices * u,
        "a copy to try the removal on, in float32: 8 P bytes": 8 * p / machine.bandwidth,
        "slicing weights and Adam's state: 24 P bytes": 24 * p / machine.bandwidth,
    }


def traffic_of_cut(decoder: Decoder, gpus: int) -> float:
    """Bytes a GPU would receive if only what is cut along the dimension FSDP2 parts by were gathered.

    Shards are rows. Removing columns, of down_proj and o_proj, needs no other process; removing rows, of gate, up,
    query, key and value, moves the rows between shards.
    """
    rows = 2 * decoder.intermediate + (decoder.heads + 2 * decoder.groups) * decoder.head_dim
    return 12 * decoder.layers * rows * decoder.hidden * (gpus - 1) / gpus


def checkpoints(decoder: Decoder, constants: Constants, left: float) -> dict[str, float]:
    """Files. ``left``: the share of removable parameters that stays."""
    p = decoder.parameters - (1 - left) * decoder.removable
    return {
        "weights and Adam in float32, before anything went: 12 P": 12 * decoder.parameters,
        "gates in it: 24 U": 24 * decoder.units,
        "record of what was removed": constants.record * decoder.units,
        f"weights and Adam, {left:.0%} of the removable left": 12 * p,
        f"the finished network in bf16, {left:.0%} of the removable left": 2 * p,
    }
