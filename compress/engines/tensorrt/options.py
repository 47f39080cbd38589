"""Options of a TensorRT build, and the shapes that an engine admits; the library is not needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from compress.engines.base import TensorInfo, shape_text
from compress.errors import EngineError, near_misses

Hardware = Literal["none", "ampere-plus", "same-compute-capability"]
Shape = tuple[int, ...]

# Compute capabilities that TensorRT-RTX builds for by default: Ampere and later (its documentation, CPU-only AOT
# engines).
PORTABLE_SMS = (80, 86, 89, 120)

DEFAULT_BATCH = (1, 8, 32)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Shapes of one input: least, best and largest."""

    min: Shape
    opt: Shape
    max: Shape

    def admits(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True)
        )


def _integers(name: str, text: str) -> tuple[int, ...]:
    parts = [part.strip().lower().removeprefix("sm") for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() for part in parts):
        raise EngineError(f"{name} is {text!r}: it must be numbers with commas between them, such as 89,120")
    return tuple(map(int, parts))


def _integer(name: str, text: str) -> int:
    numbers = _integers(name, text)
    if len(numbers) != 1:
        raise EngineError(f"{name} is {text!r}: it must be one number")
    return numbers[0]


def yes_or_no(name: str, text: str) -> bool:
    if text.lower() not in {"yes", "no", "true", "false"}:
        raise EngineError(f"{name} is {text!r}: it must be yes or no")
    return text.lower() in {"yes", "true"}


def _device(name: str, text: str) -> int:
    found = re.fullmatch(r"(?:cuda:?)?(\d*)", text)
    if not found:
        raise EngineError(f"{name} is {text!r}: it must be cuda, or one of cuda:0, cuda:1, ...")
    return int(found.group(1) or 0)


@dataclass(frozen=True, kw_only=True)
class TensorRTOptions:
    """Options of a build; `OPTIONS` describes each of them."""

    sms: tuple[int, ...] = ()
    batch: tuple[int, int, int] = DEFAULT_BATCH
    size: tuple[int, int, int] | None = None
    workspace_mib: int | None = None
    sparse: bool | None = None
    tf32: bool = True
    optimization_level: int | None = None
    refit: bool = False
    hardware: Hardware = "none"
    version_compatible: bool = False
    timing_cache: Path | None = None
    device: int = 0

    def __post_init__(self) -> None:
        level, workspace = self.optimization_level, self.workspace_mib
        checks = (
            ("sm", self.sms, len(set(self.sms)) == len(self.sms), "numbers that differ, such as 89,120"),
            ("batch", self.batch, _ordered(self.batch), "three numbers of 1 or more that do not fall, such as 1,8,32"),
            ("size", self.size, self.size is None or _ordered(self.size), "three numbers that do not fall, or none"),
            ("workspace_mib", workspace, workspace is None or workspace >= 1, "1 or more"),
            ("optimization_level", level, level is None or 0 <= level <= 5, "0 to 5"),
            ("hardware", self.hardware, self.hardware in get_args(Hardware), f"one of {', '.join(get_args(Hardware))}"),
            ("device", self.device, self.device >= 0, "0 or more"),
        )
        for name, got, fits, allowed in checks:
            if not fits:
                raise EngineError(f"{name} is {got!r}: it must be {allowed}")

    def to_dict(self) -> dict[str, Any]:
        """The options that change the engine; timing cache and GPU index do not."""
        values = asdict(self)
        del values["timing_cache"], values["device"]
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _ordered(numbers: Sequence[int]) -> bool:
    return len(numbers) == 3 and 1 <= numbers[0] <= numbers[1] <= numbers[2]


# Parser and meaning of each option; all but `cuda_graph`, which is an option of a run, are fields of the build's.
_OPTIONS: dict[str, tuple[Callable[[str, str], Any], str]] = {
    "sm": (
        _integers,
        "compute capabilities to build for, such as 89,120, all in one file (tensorrt-rtx); by default that of the GPU "
        "here, or Ampere and later without one; tensorrt builds for the GPU here",
    ),
    "batch": (_integers, "least, best and largest batch of a file whose batch is open: 1,8,32 by default"),
    "size": (_integers, "least, best and largest side in pixels of a file whose image size is open"),
    "workspace_mib": (_integer, "MiB that kernels may use besides weights and activations; no limit by default"),
    "sparse": (yes_or_no, "yes or no: use the sparse tensor cores for 2:4 weights; by default for a sparse network"),
    "tf32": (yes_or_no, "no: compute products of float32 in full float32; by default in TF32"),
    "optimization_level": (_integer, "0 (fast build) to 5 (long search); 3 by default"),
    "refit": (yes_or_no, "yes: weights can be replaced in the built engine"),
    "hardware": (
        lambda name, text: text,
        f"other GPUs that the engine runs on: {', '.join(get_args(Hardware))} (tensorrt)",
    ),
    "version_compatible": (yes_or_no, "yes: the engine runs with later versions of the library (tensorrt)"),
    "timing_cache": (
        lambda name, text: Path(text),
        "file that stores times of kernels between builds (tensorrt); by default in the user's cache folder",
    ),
    "device": (_device, "GPU, such as cuda:1; cuda:0 by default"),
    "cuda_graph": (yes_or_no, "yes: replay a run as one CUDA graph; for fixed shapes"),
}

OPTIONS = {name: meaning for name, (_, meaning) in _OPTIONS.items()}


def parse_options(given: Mapping[str, str], *, batch_size: int | None = None) -> TensorRTOptions:
    for name in given:
        if name not in OPTIONS:
            raise EngineError(f"unknown option {name!r}{near_misses(name, OPTIONS)} (options: {', '.join(OPTIONS)})")
    values = {name: _OPTIONS[name][0](name, text) for name, text in given.items()}
    values.pop("cuda_graph", None)
    if "sm" in values:
        values["sms"] = values.pop("sm")
    if batch_size is not None:
        values["batch"] = (batch_size,) * 3
    return TensorRTOptions(**values)


def profiles_of(inputs: Sequence[TensorInfo], options: TensorRTOptions, *, where: str) -> dict[str, Profile]:
    """The shapes that an engine of these inputs admits: the first dimension is the batch, the last two are sizes."""
    return {tensor.name: _profile(tensor, options, where) for tensor in inputs}


def _profile(tensor: TensorInfo, options: TensorRTOptions, where: str) -> Profile:
    columns = []
    for axis, size in enumerate(tensor.shape):
        if size != -1:
            columns.append((size, size, size))
        elif axis == 0:
            columns.append(options.batch)
        elif len(tensor.shape) == 4 and axis >= 2 and options.size is not None:
            columns.append(options.size)
        else:
            advice = "give size=least,best,largest" if len(tensor.shape) == 4 and axis >= 2 else "export it fixed"
            raise EngineError(
                f"{where}: dimension {axis} of input {tensor.name!r} {shape_text(tensor.shape)} is open; {advice}"
            )
    low, best, high = zip(*columns, strict=True) if columns else ((), (), ())
    return Profile(min=tuple(low), opt=tuple(best), max=tuple(high))


def check_admitted(name: str, shape: Sequence[int], profile: Profile, *, label: str) -> None:
    if profile.admits(shape):
        return
    batch_only = len(shape) == len(profile.min) and Profile(min=profile.min[1:], opt=(), max=profile.max[1:]).admits(
        shape[1:]
    )
    advice = f"build it with batch=1,{shape[0]},{shape[0]}" if batch_only else "build it for that size"
    raise EngineError(
        f"{label}: input {name!r} has shape {tuple(shape)}; this engine was built for {profile.min} to {profile.max}: "
        f"{advice}"
    )


def choose_sms(options: TensorRTOptions, known: Sequence[int], here: int | None, *, title: str) -> tuple[int, ...]:
    """The compute capabilities that a portable engine is built for; `here` is of this machine's GPU."""
    if not options.sms:
        return (here,) if here is not None and here in known else tuple(sm for sm in PORTABLE_SMS if sm in known)
    for sm in options.sms:
        if sm not in known:
            raise EngineError(
                f"{title} does not build for SM {sm} (it does for {', '.join(map(str, known))}); SM {sm} needs "
                f"TensorRT itself: build on a machine with that GPU with --engine tensorrt"
            )
    return tuple(sorted(options.sms))
