"""What a TensorRT engine is built with, and the shapes that it admits: numbers and checks, without the library.

A network with a dynamic batch or size gets an optimization profile: the smallest and largest shape that the engine will
take, and the one in between that its kernels are chosen for. An engine of one fixed shape is the fastest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from compress.engines.arrays import shape_text
from compress.engines.base import TensorInfo
from compress.errors import EngineError, near_misses

Hardware = Literal["none", "ampere-plus", "same-compute-capability"]
Shape = tuple[int, ...]

PORTABLE_SMS = (80, 86, 89, 120)
"""What TensorRT-RTX builds for by default: Ampere and later (its documentation, CPU-only AOT engines)."""
DEFAULT_BATCH = (1, 8, 32)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Shapes of one input: least, best and largest."""

    min: Shape
    opt: Shape
    max: Shape

    def admits(self, shape: Sequence[int]) -> bool:
        """Whether an engine with this profile takes an input of `shape`."""
        return len(shape) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class TensorRTOptions:
    """How an engine is built.

    Attributes:
        sms: compute capabilities, 89 for 8.9 (TensorRT-RTX; one file serves all of them). () = that of the GPU here, or
            Ampere and later without one. TensorRT itself builds for the GPU that is there.
        batch: least, best and largest batch of a file whose batch is open.
        size: least, best and largest side, in pixels, of a file whose image size is open; None refuses such a file.
        workspace_mib: memory that kernels may use beside weights and activations, in MiB; None = no limit.
        sparse: look for 2:4 weights and use the sparse tensor cores for them; None = where the file's
            `compress.variant` is a sparse one.
        tf32: products of float32 may be computed in TF32 (10 bits of mantissa, on Ampere and later), as the library
            does unless told otherwise.
        optimization_level: 0 (fast build) to 5 (long search); None = the library's own (3).
        refit: weights can be replaced in the built engine.
        hardware: run on other GPUs too: of `ampere-plus`, or of the `same-compute-capability` (TensorRT).
        version_compatible: run with later versions of the library (TensorRT).
        timing_cache: file in which times of kernels are kept and found again (TensorRT); None = one in the user's cache
            folder, for this version and GPU.
        device: index of the GPU to build on.
    """

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
        """Plain JSON values of what shapes the engine; the place of the cache and the GPU's index do not."""
        told = asdict(self)
        del told["timing_cache"], told["device"]
        return {key: list(value) if isinstance(value, tuple) else value for key, value in told.items()}


def _ordered(numbers: Sequence[int]) -> bool:
    return len(numbers) == 3 and 1 <= numbers[0] <= numbers[1] <= numbers[2]


OPTIONS: dict[str, str] = {
    "sm": "compute capabilities to build for, such as 89,120 (tensorrt-rtx)",
    "batch": "least, best and largest batch of a file whose batch is open: 1,8,32 by default",
    "size": "least, best and largest side in pixels of a file whose image size is open",
    "workspace_mib": "memory that kernels may use beside weights and activations",
    "sparse": "yes or no: use the sparse tensor cores for 2:4 weights; by default for a sparse network",
    "tf32": "no: products of float32 in float32 proper; by default in TF32",
    "optimization_level": "0 (fast build) to 5 (long search)",
    "refit": "yes: weights can be replaced in the built engine",
    "hardware": f"other GPUs that it shall run on: {', '.join(get_args(Hardware))} (tensorrt)",
    "version_compatible": "yes: it shall run with later versions of the library (tensorrt)",
    "timing_cache": "file in which times of kernels are kept and found again (tensorrt)",
    "device": "which GPU, such as cuda:1; cuda:0 by default",
    "cuda_graph": "yes: replay a run as one CUDA graph; for fixed shapes",
}


def parse_options(given: Mapping[str, str], *, batch_size: int | None = None) -> TensorRTOptions:
    """Options as text (of `build_engine` or the command line) as numbers.

    Args:
        given: by the names of `OPTIONS`.
        batch_size: the one batch that the engine shall take; None = what `given` says.

    Raises:
        EngineError: an unknown name, or a text that is no such value.
    """
    for name in given:
        if name not in OPTIONS:
            raise EngineError(f"unknown option {name!r}{near_misses(name, OPTIONS)} (options: {', '.join(OPTIONS)})")
    values: dict[str, Any] = {"sms" if k == "sm" else k: _PARSERS[k](k, v) for k, v in given.items() if k in _PARSERS}
    if batch_size is not None:
        values["batch"] = (batch_size,) * 3
    return TensorRTOptions(**values)


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
    """A switch as text.

    Raises:
        EngineError: it is neither.
    """
    if text.lower() not in {"yes", "no", "true", "false"}:
        raise EngineError(f"{name} is {text!r}: it must be yes or no")
    return text.lower() in {"yes", "true"}


def _device(name: str, text: str) -> int:
    found = re.fullmatch(r"(?:cuda:?)?(\d*)", text)
    if not found:
        raise EngineError(f"{name} is {text!r}: it must be cuda, or one of cuda:0, cuda:1, ...")
    return int(found.group(1) or 0)


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "sm": _integers,
    "batch": _integers,
    "size": _integers,
    "workspace_mib": _integer,
    "sparse": yes_or_no,
    "tf32": yes_or_no,
    "optimization_level": _integer,
    "refit": yes_or_no,
    "hardware": lambda name, text: text,
    "version_compatible": yes_or_no,
    "timing_cache": lambda name, text: Path(text),
    "device": _device,
}


def profiles_of(inputs: Sequence[TensorInfo], options: TensorRTOptions, *, where: str) -> dict[str, Profile]:
    """The shapes that an engine of these inputs shall admit, by input.

    The first dimension is the batch; of images (four dimensions) the last two are the size.

    Raises:
        EngineError: an open dimension that no option closes.
    """
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
    """Refuse an input that an engine was not built for.

    Raises:
        EngineError: says what the engine takes, and with which option to build another.
    """
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
    """Compute capabilities that a portable engine is built for.

    Args:
        options: `sms` holds what is asked.
        known: those that the library can name.
        here: that of the GPU of this machine; None without one.
        title: of the library, for messages.

    Raises:
        EngineError: one that the library does not build for; of a data-centre GPU, says that TensorRT itself does.
    """
    if not options.sms:
        return (here,) if here is not None and here in known else tuple(sm for sm in PORTABLE_SMS if sm in known)
    for sm in options.sms:
        if sm not in known:
            raise EngineError(
                f"{title} does not build for SM {sm} (it does for {', '.join(map(str, known))}); SM {sm} needs "
                f"TensorRT itself: build on a machine with that GPU with --engine tensorrt"
            )
    return tuple(sorted(options.sms))
