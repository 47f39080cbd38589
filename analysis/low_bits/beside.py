"""Measurements that run beside the trainings, each in a process of its own, as soon as its float network is there."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from analysis.low_bits.train import float_file

BESIDE: dict[str, tuple[str, str, str]] = {
    f"{network}-{bits}": ("ptq", network, bits)
    for network in ("resnet20", "mobilenet_v2", "resnet56", "vit_tiny", "vgg16_bn", "convnext")
    for bits in ("W4A8", "W4A4")
} | {f"{network}-sparse": ("one_shot", network, "") for network in ("resnet56", "vit_tiny", "resnet20", "vgg16_bn")}
"""(module, network, bits) by name."""


@dataclass
class Beside:
    """A queue of measurements.

    Attributes:
        names: of `BESIDE`, in order; those whose network is not there yet wait.
        out, floats: folders that float networks are looked for in; a measurement writes into `out`/<module>-<name>.
        data: folder of cifar-10-batches-py.
        steps: of reconstruction.
        most: processes at a time.
    """

    names: list[str]
    out: Path
    floats: Path
    data: str
    steps: int
    most: int = 2
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def poll(self) -> bool:
        """Start what can start; return True if nothing is left or running."""
        self.running = {name: process for name, process in self.running.items() if process.poll() is None}
        for name in list(self.names):
            module, network, bits = BESIDE[name]
            weights = float_file(network, self.out, self.floats)
            if len(self.running) < self.most and weights.exists():
                self.names.remove(name)
                self._start(name, module, network, bits, weights)
        return not self.names and not self.running

    def kill(self) -> None:
        """Terminate the processes that still run."""
        for process in self.running.values():
            process.kill()

    def gather(self) -> None:
        """Append the rows of all measurements to files of their kinds."""
        for kind in ("ptq", "one_shot"):
            files = [self.out / f"{kind}.jsonl", *sorted(self.out.glob(f"{kind}-*/{kind}.jsonl"))]
            rows = [line for path in files if path.exists() for line in path.read_text().splitlines()]
            if rows:
                files[0].write_text("\n".join(dict.fromkeys(rows)) + "\n")

    def _start(self, name: str, module: str, network: str, bits: str, weights: Path) -> None:
        options = ["--bits", bits, "--steps", str(self.steps)] if bits else []
        command = [sys.executable, "-m", f"analysis.low_bits.{module}", "--network", network, *options]
        command += ["--data", self.data, "--weights", str(weights), "--out", str(self.out / f"{module}-{name}")]
        log = (self.out / f"{module}-{name}.log").open("a")
        environment = {**os.environ, "OMP_NUM_THREADS": "2"}
        self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
