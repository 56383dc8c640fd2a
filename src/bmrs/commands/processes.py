"""Several processes that train one network, as ``torchrun`` starts them; without it, one."""

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from bmrs.commands.errors import device_of


class Processes:
    """The group of processes, this one's place in it and its device. Use it in a ``with`` statement."""

    def __init__(self, device: str) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
        self.rank = int(os.environ["RANK"]) if self.world > 1 else 0
        self.device = device_of(device)
        if self.world > 1 and self.device.type == "cuda" and ":" not in device:
            self.device = device_of(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")

    @property
    def first(self) -> bool:
        """The one that prints and writes."""
        return self.rank == 0

    def __enter__(self) -> Self:
        if self.world > 1:
            cuda = self.device.type == "cuda"
            if cuda:
                torch.cuda.set_device(self.device)
            distributed.init_process_group("nccl" if cuda else "gloo")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error others may wait for this one: torchrun ends them.
        if self.world > 1 and error is None:
            distributed.destroy_process_group()

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """The first process alone, then the others: what one fetches, the others find."""
        if not self.first:
            distributed.barrier()
        yield
        if self.first and self.world > 1:
            distributed.barrier()

    def wrapped(self, network: nn.Module) -> nn.Module:
        return network if self.world == 1 else DistributedDataParallel(network)

    def shared(self, value: Any) -> Any:
        """The first process's, on all of them."""
        if self.world == 1:
            return value
        held = [value]
        distributed.broadcast_object_list(held, src=0, device=self.device)
        return held[0]

    def summed(self, values: Tensor) -> Tensor:
        if self.world > 1:
            distributed.all_reduce(values)
        return values

    def seed(self, seed: int, epoch: int) -> None:
        """Everybody's random numbers, for dropout and what changes images, as this epoch of this process has them."""
        number = random.Random(f"{seed} {epoch} {self.rank}").getrandbits(32)
        torch.manual_seed(number)
        random.seed(number)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(number)
