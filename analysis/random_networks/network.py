"""Random small networks: a chain of operations of all kinds, each of which keeps the shape (N, 8, 8, 8).

A network is a list of steps (name of an operation, seed). Every step reads the value before it and an earlier one, so
that any step can be taken out of the list and the rest is still a network: that is how failures are shrunk.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis.random_networks.operations import CHANNELS, LAYERS, OTHERS, RARE_LAYERS, RARE_OTHERS, Op, conv

TABLES: tuple[dict[str, Callable[[], Op]], ...] = (LAYERS | RARE_LAYERS, OTHERS | RARE_OTHERS)
OPERATIONS = TABLES[0] | TABLES[1]


@dataclass(frozen=True)
class Step:
    """One operation of a network.

    Attributes:
        name: of the operation.
        seed: of its weights, and of the earlier value that it reads.
    """

    name: str
    seed: int


class Network(nn.Module):
    """A chain of operations and a classifier; input (N, 8, 8, 8)."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        super().__init__()
        self.earlier = [random.Random(step.seed).randrange(100) for step in steps]
        ops = []
        for step in steps:
            torch.manual_seed(step.seed)
            ops.append(OPERATIONS[step.name]())
        self.ops = nn.ModuleList(ops)
        torch.manual_seed(0)
        self.stem, self.fc = conv(), nn.Linear(4 * CHANNELS, 5, bias=False)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.ndim > 1 and not name.endswith("logit_scale"):  # a temperature: of 100 it magnifies rounding
                    weight.mul_(2.4)  # He's deviation in place of torch's: the signal survives the depth

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits, (N, 5)."""
        values = [x, self.stem(x)]
        for op, earlier in zip(self.ops, self.earlier, strict=True):
            values.append(op(values[-1], values[earlier % len(values)]))
        logits: Tensor = self.fc(torch.flatten(F.adaptive_avg_pool2d(values[-1], 2), 1))
        return logits


def steps_of(seed: int) -> tuple[Step, ...]:
    draw = random.Random(seed)
    names = [draw.choice(list(draw.choice(TABLES))) for _ in range(draw.randint(2, 9))]
    return tuple(Step(name, draw.randrange(2**31)) for name in names)
