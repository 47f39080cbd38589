"""Measurement of this machine's roofs: the rate of copies, and of products at each precision; and of nodes in torch.

Sizes are timed in turn, and the best round counts, because noise only slows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compress.errors import RooflineError
from compress.files import cache_folder, read_json, write_json
from compress.roofline_model.devices import PRECISIONS, SPARSE, Device, parse_precision
from compress.support.process import load_average, processor_name, restored
from compress.support.progress import NoProgress, Progress, tracked

Backend = Literal["cpu", "cuda"]
# Suffix of the name of a ceiling that was measured with convolutions.
CONV = " conv"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One size that was timed.

    Attributes:
        size: side of the matrices, channels of the convolution, or bytes of the buffer.
        arithmetic_intensity: flops per byte of operands and result; 0 for a copy.
    """

    size: int
    rate: float
    arithmetic_intensity: float


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """One roof.

    Attributes:
        name: `copy`, or a precision such as `int8-2:4`, followed by ` conv` for convolutions.
        rate: the best of its samples; None if it could not be measured.
        unit: `bytes/s` (read and written) or `flops/s` (2 for a multiply-accumulate).
    """

    name: str
    rate: float | None
    unit: str
    method: str
    samples: tuple[Sample, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The measured roofs of one machine, copies first.

    Attributes:
        threads: of torch; 0 on a GPU.
        load_average: over a minute, before and after; empty if the system has none.
    """

    backend: str
    title: str
    threads: int
    rounds: int
    torch_version: str
    load_average: tuple[float, ...]
    ceilings: tuple[Ceiling, ...]

    def as_device(self) -> Device:
        rates: dict[str, float] = {}
        for ceiling in self.ceilings:
            if ceiling.rate is not None:
                name = ceiling.name.removesuffix(CONV)
                rates[name] = max(ceiling.rate, rates.get(name, 0.0))
        if "copy" not in rates:
            raise RooflineError(f"the ceilings of {self.title} hold no copy bandwidth; measure them again")
        bandwidth = rates.pop("copy")
        return Device(
            name="machine",
            title=self.title,
            bandwidth_bytes_per_s=bandwidth,
            dense_flops_per_s={name: rate for name, rate in rates.items() if not name.endswith(SPARSE)},
            sparse_flops_per_s={n.removesuffix(SPARSE): rate for n, rate in rates.items() if n.endswith(SPARSE)},
            source=f"measured here with torch {self.torch_version}, best of {self.rounds} rounds",
            note=f"{self.threads} threads" if self.threads else "",
        )

    def save(self, path: Path | str | None = None) -> Path:
        return write_json(ceilings_path(self.backend) if path is None else path, asdict(self))


def ceilings_path(backend: str) -> Path:
    return cache_folder() / f"ceilings-{backend}.json"


def load_ceilings(path: Path | str) -> Ceilings:
    try:
        raw: dict[str, Any] = read_json(path)
        ceilings = tuple(
            Ceiling(**{**c, "samples": tuple(Sample(**s) for s in c["samples"])}) for c in raw.pop("ceilings")
        )
        return Ceilings(**{**raw, "load_average": tuple(raw["load_average"])}, ceilings=ceilings)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RooflineError(
            f"{path} holds no ceilings ({error}); measure them with `python -m compress roofline --measure`"
        ) from error


def machine_device() -> Device:
    """This machine as it was measured: its GPU if one was, else its CPU."""
    backends: tuple[Backend, ...] = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    found = [ceilings_path(backend) for backend in backends if ceilings_path(backend).is_file()]
    if not found:
        raise RooflineError(
            "this machine was not measured yet; run `python -m compress roofline --measure`, or "
            "compress.roofline_model.measure_ceilings().save()"
        )
    return load_ceilings(found[0]).as_device()


Work = Callable[[], object]

CPU_SIZES = (256, 512, 1024, 2048, 3072)
CONV_CHANNELS = (64, 128, 256, 512)
CUDA_SIZES = (1024, 2048, 4096, 8192, 16384)
CPU_COPY_BYTES = (64 * 2**20, 256 * 2**20)
CUDA_COPY_BYTES = (256 * 2**20, 2**30)
_MAP = 28  # height and width of the convolutions' maps


def measure_ceilings(
    device: Backend = "cpu",
    *,
    sizes: Sequence[int] | None = None,
    copy_bytes: Sequence[int] | None = None,
    rounds: int = 3,
    budget_s: float = 1.0,
    progress: Progress | None = None,
) -> Ceilings:
    """Time copies and matrix products on this machine, in a minute or two; nothing else should run.

    - `sizes`: sides of the square matrices, ascending.
    - `copy_bytes`: larger than the caches.
    - `budget_s`: seconds for one size in one round; a size whose single run takes longer is left out.
    """
    if device not in {"cpu", "cuda"}:
        raise RooflineError(f"ceilings are measured on 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise RooflineError("torch sees no CUDA GPU here; measure device='cpu', or install torch's CUDA build")
    sizes = tuple(sizes or (CPU_SIZES if device == "cpu" else CUDA_SIZES))
    copy_bytes = tuple(copy_bytes or (CPU_COPY_BYTES if device == "cpu" else CUDA_COPY_BYTES))
    if rounds < 1 or min(*sizes, *copy_bytes, 1) < 1:
        raise RooflineError(f"sizes and rounds must be positive, got {sizes}, {copy_bytes}, {rounds} rounds")
    before = load_average()
    roofs = [_copy_roof(device), *_product_roofs(device)]
    best: dict[str, Ceiling] = {}
    for roof in tracked(progress or NoProgress(), "ceilings", rounds * roofs):
        measured = _measure(roof, copy_bytes if roof.name == "copy" else roof.sizes or sizes, device, budget_s)
        best[roof.name] = _better(best.get(roof.name), measured)
    return Ceilings(
        backend=device,
        title=torch.cuda.get_device_name() if device == "cuda" else processor_name(),
        threads=0 if device == "cuda" else torch.get_num_threads(),
        rounds=rounds,
        torch_version=torch.__version__,
        load_average=tuple(load for load in (before, load_average()) if load is not None),
        ceilings=_without_emulated(tuple(best.values())),
    )


@dataclass(frozen=True, kw_only=True)
class _Roof:
    """A roof: `make(size)` prepares the work, `amount(size)` and `moved(size)` are its flops and bytes."""

    name: str
    unit: str
    method: str
    make: Callable[[int], Work]
    amount: Callable[[int], float]
    moved: Callable[[int], float]
    sizes: tuple[int, ...] = ()


def _copy_roof(device: Backend) -> _Roof:
    def make(size: int) -> Work:
        source = torch.ones(size // 4, device=device)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    def amount(size: int) -> float:
        return 2.0 * size

    method = "Tensor.copy_, bytes read + bytes written"
    return _Roof(name="copy", unit="bytes/s", method=method, make=make, amount=amount, moved=amount)


def _product_roofs(device: Backend) -> list[_Roof]:
    def floats(dtype: torch.dtype, tf32: bool = False) -> Callable[[int], Work]:
        def make(size: int) -> Work:
            a, b = (_random(size, device).to(dtype) for _ in range(2))
            return lambda: _matmul(a, b, tf32=tf32)

        return make

    def int8(size: int) -> Work:
        a, b = (torch.randint(-127, 128, (size, size), dtype=torch.int8, device=device) for _ in range(2))
        return lambda: torch._int_mm(a, b.t())

    def fp8(size: int) -> Work:
        a, b = (_random(size, device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def sparse(dtype: torch.dtype) -> Callable[[int], Work]:
        def make(size: int) -> Work:
            mask = torch.tensor([1, 1, 0, 0], device=device).repeat(size, size // 4)
            a = (_random(size, device) * 30 * mask).clamp(-127, 127).to(dtype)
            b = (_random(size, device) * 30).clamp(-127, 127).to(dtype)
            packed = torch.sparse.to_sparse_semi_structured(a)
            return lambda: torch.mm(packed, b.t())

        return make

    def roof(name: str, method: str, make: Callable[[int], Work]) -> _Roof:
        return _Roof(
            name=name,
            unit="flops/s",
            method=method,
            make=make,
            amount=lambda n: 2.0 * n**3,
            moved=lambda n: n * n * product_bytes(name),
        )

    common = [
        roof("fp32", "torch.mm, float32", floats(torch.float32)),
        roof("bf16", "torch.mm, bfloat16", floats(torch.bfloat16)),
        roof("fp16", "torch.mm, float16", floats(torch.float16)),
        roof("int8", "torch._int_mm, int8 with int32 sums, second matrix transposed", int8),
    ]
    if device == "cpu":
        return [*common, _conv_roof("fp32", torch.float32), _conv_roof("bf16", torch.bfloat16)]
    semi = "torch semi-structured 2:4 @ dense"
    return [
        *common,
        roof("tf32", "torch.mm, float32 multiplied as TF32", floats(torch.float32, tf32=True)),
        roof("fp8", "torch._scaled_mm, float8_e4m3fn, bfloat16 result, fast accumulation", fp8),
        roof(f"fp16{SPARSE}", f"{semi}, float16", sparse(torch.float16)),
        roof(f"bf16{SPARSE}", f"{semi}, bfloat16", sparse(torch.bfloat16)),
        roof(f"int8{SPARSE}", f"{semi}, int8", sparse(torch.int8)),
    ]


def product_bytes(precision: str) -> int:
    """The bytes per element of a product's operands and result (int8 gives int32, fp8 gives bf16)."""
    base = parse_precision(precision).base
    return 2 * PRECISIONS[base] + {"int8": 4, "fp8": 2}.get(base, PRECISIONS[base])


def _conv_roof(name: str, dtype: torch.dtype) -> _Roof:
    """3x3 convolutions on a CPU, in oneDNN's fastest layout."""
    size_of = PRECISIONS[name]

    def make(channels: int) -> Work:
        x = torch.randn(1, channels, _MAP, _MAP, dtype=dtype).to(memory_format=torch.channels_last)
        weight = torch.randn(channels, channels, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)
        return lambda: torch.conv2d(x, weight, padding=1)

    return _Roof(
        name=name + CONV,
        unit="flops/s",
        method=f"torch.conv2d, 3x3, maps of {_MAP}x{_MAP}, channels last",
        make=make,
        amount=lambda c: 2.0 * 9 * c * c * _MAP**2,
        moved=lambda c: size_of * (9.0 * c * c + 2 * c * _MAP**2),
        sizes=CONV_CHANNELS,
    )


def _random(size: int, device: Backend) -> Tensor:
    return torch.randn(size, size, device=device)


def _matmul(a: Tensor, b: Tensor, *, tf32: bool) -> Tensor:
    precision = "high" if tf32 else "highest"
    with restored(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, precision):
        return torch.mm(a, b)


def _measure(roof: _Roof, sizes: Sequence[int], device: Backend, budget_s: float) -> Ceiling:
    """Time one round, ascending, until a size would exceed the budget."""
    samples: list[Sample] = []
    reason, expected_s = "", 0.0
    for size in sizes:
        if samples and expected_s * roof.amount(size) / roof.amount(samples[-1].size) > budget_s:
            break
        try:
            with torch.no_grad():
                expected_s = _seconds(roof.make(size), device, budget_s)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            break
        finally:
            if device == "cuda":
                torch.cuda.empty_cache()
        intensity = 0.0 if roof.name == "copy" else roof.amount(size) / roof.moved(size)
        samples.append(Sample(size=size, rate=roof.amount(size) / expected_s, arithmetic_intensity=intensity))
    return Ceiling(
        name=roof.name,
        rate=max((s.rate for s in samples), default=None),
        unit=roof.unit,
        method=roof.method,
        samples=tuple(samples),
        reason="" if samples else reason,
    )


def _seconds(work: Work, device: Backend, budget_s: float) -> float:
    """Median seconds after a warm-up, of 3 to 50 runs within the budget."""
    _clock(work, device)
    first = _clock(work, device)
    runs = min(max(int(budget_s / max(first, 1e-9)), 3), 50)
    return statistics.median(_clock(work, device) for _ in range(runs))


def _clock(work: Work, device: Backend) -> float:
    if device == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _better(old: Ceiling | None, new: Ceiling) -> Ceiling:
    if old is None or old.rate is None:
        return new
    best: dict[int, Sample] = {}
    for sample in (*old.samples, *new.samples):
        best[sample.size] = max(sample, best.get(sample.size, sample), key=lambda s: s.rate)
    return replace(old, samples=tuple(best.values()), rate=max(s.rate for s in best.values()))


def _without_emulated(ceilings: tuple[Ceiling, ...]) -> tuple[Ceiling, ...]:
    fp32 = next((c.rate for c in ceilings if c.name == "fp32"), None) or 0.0
    return tuple(
        replace(c, rate=None, reason=f"no fast kernel here: {c.rate / 1e9:.3g} GFLOP/s, slower than fp32")
        if c.unit == "flops/s" and c.rate is not None and c.rate < fp32 / 2
        else c
        for c in ceilings
    )
