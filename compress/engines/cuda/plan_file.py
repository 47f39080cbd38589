"""The plan file beside a model: which kernel is the fastest for each step, measured once on one GPU."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from compress.errors import EngineError
from compress.files import read_json, write_json

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The conditions under which a measurement is valid.

    Attributes:
        capability: its compute capability, such as "9.0".
        driver: its version, such as "580.159.04".
    """

    gpu: str
    capability: str
    driver: str
    torch: str
    triton: str


@dataclass
class PlanFile:
    """Choices of one machine.

    Attributes:
        choices: name of the fastest candidate, by `key` of a signature.
        refused: why candidates were left out, by `key` and by their names.
        changed: there are choices that the file does not have yet.
    """

    path: Path
    machine: Machine
    choices: dict[str, str] = field(default_factory=dict)
    refused: dict[str, dict[str, str]] = field(default_factory=dict)
    changed: bool = False

    def add(self, signature: str, candidate: str, refused: Mapping[str, str] | None = None) -> None:
        """Add a choice, and why other candidates were left out."""
        if self.get(signature) != candidate:
            self.choices[key(signature)] = candidate
            self.changed = True
        if refused:
            self.refused[key(signature)] = dict(refused)

    def get(self, signature: str) -> str | None:
        """The choice for a signature; None if there is none."""
        return self.choices.get(key(signature))

    def save(self) -> None:
        """Write the file, whole or not at all, if there is something new.

        Raises:
            EngineError: the folder cannot be written.
        """
        if not self.changed:
            return
        try:
            content = {"format": FORMAT, "machine": asdict(self.machine), "choices": self.choices}
            write_json(self.path, content | ({"refused": self.refused} if self.refused else {}))
        except OSError as error:
            raise EngineError(
                f"{self.path}: the plan cannot be written ({error.strerror or error}); name another place with the "
                "option plan, or measure nothing with tune='no'"
            ) from error
        self.changed = False


def key(signature: str) -> str:
    """A short name of a signature."""
    return hashlib.sha256(signature.encode()).hexdigest()[:20]


def machine_of(device: torch.device) -> Machine:
    """The machine that this process runs on.

    Args:
        device: a GPU, or the CPU, on which Triton's interpreter runs.
    """
    versions = {"torch": torch.__version__, "triton": _version("triton")}
    if device.type != "cuda":
        return Machine(gpu="none", capability="0.0", driver="none", **versions)
    properties = torch.cuda.get_device_properties(device)
    return Machine(
        gpu=properties.name, capability=f"{properties.major}.{properties.minor}", driver=_driver(), **versions
    )


def default_path(model: Path, machine: Machine) -> Path:
    """Default path of a model's plan: beside it, with the GPU in its name."""
    return model.with_name(model.stem + _ending(machine))


def _ending(machine: Machine) -> str:
    gpu = "-".join(word for word in machine.gpu.lower().split() if word not in {"nvidia", "geforce", "tesla"})
    return f".{gpu}.plan.json"


def plan_beside(model: Path, machine: Machine) -> PlanFile:
    """The plan beside a model; where there is none, one with the choices of the other plans in its folder.

    Raises:
        EngineError: as `read_plan` for the model's own plan.
    """
    path = default_path(model, machine)
    plan = read_plan(path, machine)
    if path.exists():
        return plan
    for other in sorted(model.parent.glob(f"*{_ending(machine)}")):
        with suppress(EngineError):
            plan.choices |= read_plan(other, machine).choices
    plan.changed = bool(plan.choices)
    return plan


def read_plan(path: Path, machine: Machine) -> PlanFile:
    """Read a plan file; one that does not exist yet has no choices.

    Raises:
        EngineError: it is damaged, no plan, or was measured on another GPU or with other versions.
    """
    if not path.exists():
        return PlanFile(path, machine)
    try:
        content = read_json(path)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, {FORMAT} is known")
        measured, choices = Machine(**content["machine"]), _choices(content["choices"])
        refused = {name: _choices(reasons) for name, reasons in content.get("refused", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{path} is no plan of the cuda engine, or is damaged ({type(error).__name__}: {error}): delete it, and it "
            "is measured again"
        ) from error
    if measured != machine:
        own, other = asdict(machine), asdict(measured)
        differing = ", ".join(f"{name} {other[name]} (here {own[name]})" for name in own if own[name] != other[name])
        raise EngineError(
            f"{path} was measured on another machine: {differing}; delete it to measure here, or name another file "
            "with the option plan"
        )
    return PlanFile(path, machine, choices, refused)


def _choices(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(x, str) for pair in value.items() for x in pair):
        raise ValueError("its choices are not names of kernels")
    return dict(value)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _driver() -> str:
    """The version of the GPU's driver, such as 580.159.04; else that of torch's CUDA."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else f"CUDA {torch.version.cuda}"
