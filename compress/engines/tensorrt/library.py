"""Imports TensorRT 10 and 11, its lean runtime and TensorRT-RTX; no other file does."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from compress.engines.base import Availability
from compress.errors import EngineError, EngineUnavailableError, near_misses
from compress.support.libraries import reason
from compress.version import install_hint

if TYPE_CHECKING:
    import tensorrt


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """One of the libraries.

    Attributes:
        portable: True if it builds for named compute capabilities; else it builds for the GPU here.
        timing_cache: True if it times kernels while it builds, and can store the times.
        runs: engine whose files it runs; "" = its own. Then it has no builder.
    """

    name: str
    module: str
    title: str
    install: str
    portable: bool
    timing_cache: bool
    runs: str = ""


# All libraries. The lean runtime runs version-compatible engines of TensorRT, in 45 MB instead of 2 GB.
FLAVOURS: dict[str, Flavour] = {
    "tensorrt": Flavour(
        name="tensorrt",
        module="tensorrt",
        title="TensorRT",
        install=f"{install_hint('tensorrt')} (TensorRT 10 or 11; tensorrt-cu12 for drivers of CUDA 12)",
        portable=False,
        timing_cache=True,
    ),
    "tensorrt-rtx": Flavour(
        name="tensorrt-rtx",
        module="tensorrt_rtx",
        title="TensorRT-RTX",
        install=install_hint("rtx"),
        portable=True,
        timing_cache=False,
    ),
    "tensorrt-lean": Flavour(
        name="tensorrt-lean",
        module="tensorrt_lean",
        title="TensorRT's lean runtime",
        install=f"{install_hint('lean')} (tensorrt-lean-cu12 for drivers of CUDA 12)",
        portable=False,
        timing_cache=False,
        runs="tensorrt",
    ),
}

# Those that build engines.
BUILDERS = {name: flavour for name, flavour in FLAVOURS.items() if not flavour.runs}

# Major version of TensorRT from which networks are explicit and can be strongly typed throughout.
OLDEST = 10


@dataclass
class Log:
    """Messages of a library: (severity, text), severity one of V I W E F."""

    lines: list[tuple[str, str]] = field(default_factory=list)

    def text(self) -> str:
        return "".join(f"[{severity}] {text}\n" for severity, text in self.lines)

    def errors(self) -> str:
        return " ".join(" ".join(text.split()) for severity, text in self.lines if severity in "EF")


class Library:
    """An imported library; `trt` is its module."""

    def __init__(self, flavour: Flavour, trt: Any) -> None:
        self.flavour = flavour
        self.trt = trt
        self.version = str(trt.__version__)
        self._logger, self._sinks = _make_logger(trt)
        self._lock = threading.RLock()

    @property
    def logger(self) -> tensorrt.ILogger:
        """The one logger of this process: the library uses the first that it gets and ignores all later ones."""
        return self._logger

    @contextmanager
    def listening(self) -> Iterator[Log]:
        """Collect the library's messages while the block runs; one block at a time."""
        with self._lock:
            log = Log()
            self._sinks.append(log)
            try:
                yield log
            finally:
                self._sinks.remove(log)

    def sms(self) -> tuple[int, ...]:
        """Compute capabilities that a build can name, as 75, 80, ...; () if the library has no list."""
        members = getattr(getattr(self.trt, "ComputeCapability", None), "__members__", {})
        return tuple(sorted(int(name[2:]) for name in members if re.fullmatch(r"SM\d+", name)))


def _make_logger(trt: Any) -> tuple[tensorrt.ILogger, list[Log]]:
    sinks: list[Log] = []
    letters = {"VERBOSE": "V", "INFO": "I", "WARNING": "W", "ERROR": "E", "INTERNAL_ERROR": "F"}

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: tensorrt.ILogger.Severity, text: str) -> None:
            for sink in sinks:
                sink.lines.append((letters.get(severity.name, "I"), text))

    return Logger(), sinks


def start_runtime(library: Library) -> tensorrt.Runtime:
    with library.listening() as log:
        runtime: tensorrt.Runtime = library.trt.Runtime(library.logger)
    if log.errors():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(runtime))  # never freed: its end stops the process (11.4)
        raise EngineUnavailableError(f"{library.flavour.title} {library.version} does not start: {log.errors()}")
    return runtime


_LOADED: dict[str, Library] = {}


def tensorrt_library(name: str) -> Library:
    if name not in FLAVOURS:
        raise EngineError(
            f"{name!r} is no TensorRT engine{near_misses(name, FLAVOURS)} (one of: {', '.join(FLAVOURS)})"
        )
    flavour = FLAVOURS[name]
    library, problem = _import(flavour.module, "Runtime" if flavour.runs else "Builder")
    if problem:
        raise EngineUnavailableError(f"{problem}; {flavour.install}")
    if name in _LOADED and _LOADED[name].trt is library:
        return _LOADED[name]
    problem = two_versions(flavour.module, _installed())
    if problem:
        raise EngineUnavailableError(problem)
    major = str(library.__version__).partition(".")[0]
    if not flavour.portable and (not major.isdigit() or int(major) < OLDEST):
        raise EngineUnavailableError(
            f"{flavour.title} {library.__version__} is installed and compress needs {OLDEST} or 11, whose networks are "
            f"strongly typed: pip install --upgrade {flavour.name}"
        )
    _LOADED[name] = Library(flavour, library)
    return _LOADED[name]


def _import(module: str, member: str) -> tuple[Any, str]:
    """(the imported module, "") if it has `member`; else (None, the reason)."""
    try:
        library = importlib.import_module(module)
    except ModuleNotFoundError as error:
        return None, f"{module} is not installed" if error.name == module else f"{module} cannot be imported ({error})"
    except (Exception, SystemExit) as error:
        return None, f"{module} cannot be imported ({type(error).__name__}: {reason(error, limit=200)})"
    if getattr(library, "__file__", None) is None:  # a folder of that name, such as that of type stubs
        return None, f"{module} is not installed"
    if not hasattr(library, member):
        return None, f"the package {module} holds no {member}: it is a placeholder or another package"
    return library, ""


def _installed() -> dict[str, str]:
    found = {}
    for distribution in importlib.metadata.distributions():
        name = str(distribution.metadata["Name"] or "").lower().replace("-", "_")
        if name.startswith("tensorrt"):
            found[name] = distribution.version
    return found


def two_versions(module: str, installed: Mapping[str, str]) -> str:
    """Explain why the installed packages of a library contradict each other; "" if they do not.

    `installed` holds the version of each distribution, by name with underscores.

    >>> two_versions("tensorrt", {"tensorrt_cu12_libs": "10.9.0", "tensorrt_cu12_bindings": "10.9.0"})
    ''
    """
    own = re.compile(rf"{module}(_cu\d+)?(_(libs|bindings))?")
    parts = {name: version for name, version in installed.items() if own.fullmatch(name)}
    bindings = {name: version for name, version in parts.items() if name.endswith(("_bindings", "_libs"))}
    cudas = {found.group() for name in bindings if (found := re.search(r"_cu\d+", name))}
    if len(cudas) < 2 and len(set(bindings.values())) < 2:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(parts.items()))
    return (
        f"two versions of {module} are installed over each other ({versions}): "
        f"pip uninstall -y {' '.join(sorted(parts))}, then install one"
    )


def driver_problem(driver_cuda: int | None, library_cuda: int | None, *, title: str) -> str:
    """Explain why a driver is too old for a library; "" if it is not, or if either version is unknown.

    - `driver_cuda`: CUDA version as reported by the driver, such as 12040 for 12.4.
    - `library_cuda`: CUDA major version that the library was made for.

    >>> driver_problem(12040, 13, title="TensorRT-RTX")
    'the driver is too old: it supports CUDA 12.4 and TensorRT-RTX here is made for CUDA 13; update the driver, or \
install the package for CUDA 12'
    """
    if driver_cuda is None or library_cuda is None or driver_cuda // 1000 >= library_cuda:
        return ""
    major, minor = driver_cuda // 1000, driver_cuda % 1000 // 10
    return (
        f"the driver is too old: it supports CUDA {major}.{minor} and {title} here is made for CUDA {library_cuda}; "
        f"update the driver, or install the package for CUDA {major}"
    )


def driver_cuda() -> int | None:
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            version = ctypes.c_int(0)
            if ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version)) == 0:
                return version.value
        except (OSError, AttributeError):
            continue
    return None


def library_cuda(module: str, installed: Mapping[str, str] | None = None) -> int | None:
    """Return the CUDA major version that the installed packages of a library are made for; None if it is unknown.

    >>> library_cuda("tensorrt_rtx", {"tensorrt_rtx_cu13_libs": "1.7.1"})
    13
    """
    for name in _installed() if installed is None else installed:
        found = re.fullmatch(rf"{module}_cu(\d+)(_(libs|bindings))?", name)
        if found:
            return int(found.group(1))
    return None


def gpu_problem(flavour: Flavour, device: int = 0) -> str:
    old = driver_problem(driver_cuda(), library_cuda(flavour.module), title=flavour.title)
    if old:
        return old
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if device >= torch.cuda.device_count():
        return f"torch sees {torch.cuda.device_count()} CUDA devices, and none is cuda:{device}"
    return ""


def sm_problem(flavour: Flavour, known: Sequence[int], here: tuple[str, int] | None) -> str:
    """Explain why a library does not run on this kind of GPU; "" if it does.

    `known` are compute capabilities, () = unknown; `here` is name and compute capability of the GPU.

    >>> sm_problem(FLAVOURS["tensorrt-rtx"], (86, 89), ("NVIDIA H200", 90))
    'TensorRT-RTX does not run on NVIDIA H200 (SM 90; it does on 86, 89); that GPU needs TensorRT itself'
    """
    if here is None or not flavour.portable or not known or here[1] in known:
        return ""
    sms = ", ".join(map(str, known))
    return f"{flavour.title} does not run on {here[0]} (SM {here[1]}; it does on {sms}); that GPU needs TensorRT itself"


def gpu(device: int = 0) -> tuple[str, int] | None:
    """Name and compute capability (89 for 8.9) of a GPU; None if there is none."""
    if not torch.cuda.is_available() or device >= torch.cuda.device_count():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), 10 * major + minor


def tensorrt_availability(name: str) -> Availability:
    flavour = FLAVOURS[name]
    version, reasons, wanted = "", [], []
    known: tuple[int, ...] = ()
    try:
        library = tensorrt_library(name)
        version, known = library.version, library.sms()
    except EngineUnavailableError as error:
        reasons.append(str(error).partition(f"; {flavour.install}")[0])
        wanted.append(flavour.install)
    problem = gpu_problem(flavour) or sm_problem(flavour, known, gpu())
    if problem:
        builds = flavour.portable and not reasons
        reasons.append(
            f"engines can be built here (python -m compress build onnx), not run: {problem}" if builds else problem
        )
        wanted.append("use a machine with an NVIDIA GPU and a driver that fits")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Availability(
        name=name,
        available=not reasons,
        version=version,
        devices=tuple(f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(count)),
        reason="; ".join(reasons),
        install="; ".join(wanted),
    )
