"""Devices and precisions: peak rates and memory bandwidth (Williams, Waterman and Patterson, CACM 52(4), 2009).

Dense and 2:4 peaks are separate; attributes say flops for integers too. Data sheets give tera-operations and GB/s;
figures with 2:4 sparsity are halved for dense, and GeForce's fp16 is that with fp32 accumulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compress.errors import RooflineError, near_misses

# Bytes of one element in memory. TF32 is a way to multiply; its tensors are stored as float32.
PRECISIONS: dict[str, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}

# Suffix of a precision with 2:4 weights.
SPARSE = "-2:4"

_ALIASES = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float8": "fp8"}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The precision of products; `base` is a key of `PRECISIONS`."""

    base: str
    sparse: bool = False

    @property
    def name(self) -> str:
        return self.base + SPARSE * self.sparse

    @property
    def operation(self) -> str:
        """`op` for integers, `flop` for floating point; a multiply-accumulate is two."""
        return "op" if self.base.startswith("int") else "flop"

    @property
    def bytes_per_element(self) -> int:
        return PRECISIONS[self.base]

    @property
    def float_bytes(self) -> int:
        """Bytes of elements that stay floating point, at least fp16's."""
        return max(self.bytes_per_element, 2)

    @property
    def sparse_weight_bytes(self) -> float:
        """Mean bytes of a 2:4 weight: half of the values, each with a 2-bit index."""
        return (self.bytes_per_element + 2 / 8) / 2


def parse_precision(name: str) -> Precision:
    """Parse `fp32`, `tf32`, `fp16`, `bf16`, `fp8`, `int8`, or one of them followed by `-2:4`.

    >>> parse_precision("int8-2:4")
    Precision(base='int8', sparse=True)

    Raises:
        RooflineError: the name is unknown.
    """
    base = name.strip().lower().removesuffix(SPARSE)
    base = _ALIASES.get(base, base)
    if base not in PRECISIONS:
        raise RooflineError(
            f"unknown precision {name!r}{near_misses(base, PRECISIONS) or '.'} Allowed: {', '.join(PRECISIONS)}, each "
            f"also with the suffix {SPARSE}"
        )
    return Precision(base=base, sparse=name.strip().lower().endswith(SPARSE))


@dataclass(frozen=True, kw_only=True)
class Device:
    """Peaks and bandwidth of one device, at its highest specified clock.

    Attributes:
        sparse_flops_per_s: peaks with 2:4 weights, skipped products included.
        source: data sheet, or how it was measured.
        note: conditions and exceptions.
    """

    name: str
    title: str
    bandwidth_bytes_per_s: float
    dense_flops_per_s: Mapping[str, float]
    sparse_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    source: str
    note: str = ""

    @property
    def precisions(self) -> tuple[str, ...]:
        return (*self.dense_flops_per_s, *(base + SPARSE for base in self.sparse_flops_per_s))

    def peak_flops_per_s(self, precision: str) -> float:
        wanted = parse_precision(precision)
        peaks = self.sparse_flops_per_s if wanted.sparse else self.dense_flops_per_s
        if wanted.base not in peaks:
            raise RooflineError(f"{self.title} has no peak for {wanted.name}; it has {', '.join(self.precisions)}")
        return peaks[wanted.base]

    def ridge_point(self, precision: str) -> float:
        """The intensity from which on a layer can reach the peak, flops per byte."""
        return self.peak_flops_per_s(precision) / self.bandwidth_bytes_per_s


_JETSON = (
    "GPU alone, without the DLA, which the headline figure includes. The brief gives fp32 and sparse int8; dense int8 "
    "is half of that, fp16 and bf16 half and tf32 a quarter of int8, as on the other Ampere tensor cores"
)
_RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"
_HOPPER = "the data sheet gives tensor-core peaks with sparsity; dense is half"


def _device(
    name: str,
    title: str,
    bandwidth: float,
    source: str,
    *,
    dense: dict[str, float],
    sparse: dict[str, float] | None = None,
    note: str = "",
) -> Device:
    return Device(
        name=name,
        title=title,
        bandwidth_bytes_per_s=bandwidth * 1e9,
        dense_flops_per_s={precision: tera * 1e12 for precision, tera in dense.items()},
        sparse_flops_per_s={precision: tera * 1e12 for precision, tera in (sparse or {}).items()},
        source=source,
        note=note,
    )


def _ampere(fp32: float, int8: float) -> dict[str, float]:
    return {"fp32": fp32, "tf32": int8 / 4, "fp16": int8 / 2, "bf16": int8 / 2, "int8": int8}


def _with_sparsity(tf32: float, half: float, eight: float) -> dict[str, float]:
    return {"tf32": tf32, "fp16": half, "bf16": half, "fp8": eight, "int8": eight}


def _dense_half(fp32: float, sparse: dict[str, float]) -> dict[str, float]:
    return {"fp32": fp32, **{precision: tera / 2 for precision, tera in sparse.items()}}


# Operations of a core in a clock: two AVX-512 units, each with 16 multiply-adds.
_VECTOR_FLOPS = {"fp32": 64}
_VNNI_FLOPS = {**_VECTOR_FLOPS, "int8": 256}
_AMX_FLOPS = {**_VECTOR_FLOPS, "bf16": 1024, "int8": 2048}
_ARM_FLOPS = {"fp32": 16, "fp16": 32, "int8": 64}  # two Neon units of 128 bits, with SDOT
_PER_CLOCK = "Intel 64 and IA-32 Architectures Optimization Reference Manual"


def _xeon(name: str, title: str, cores: int, gigahertz: float, bandwidth: float, per_clock: dict[str, int]) -> Device:
    """Peaks of a socket: cores times highest clock times operations per clock."""
    return _device(
        name,
        title,
        bandwidth,
        f"Intel's product specification ({cores} cores, {gigahertz} GHz); operations a clock: {_PER_CLOCK}",
        dense={precision: cores * gigahertz * flops / 1e3 for precision, flops in per_clock.items()},
        note="one socket at its highest turbo clock, which all cores with wide vectors do not reach together; all "
        "channels of memory filled",
    )


_A100 = {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0, "int8": 624.0}
_A100_SPARSE = {"tf32": 312.0, "fp16": 624.0, "bf16": 624.0, "int8": 1248.0}
_L4_SPARSE = _with_sparsity(120.0, 242.0, 485.0)
_H100_SXM_SPARSE = _with_sparsity(989.0, 1979.0, 3958.0)
_H100_PCIE_SPARSE = _with_sparsity(756.0, 1513.0, 3026.0)
_THOR_SPARSE = {"fp16": 517.5, "bf16": 517.5, "fp8": 1035.0, "int8": 1035.0}
_B200_SPARSE = _with_sparsity(2200.0, 4500.0, 9000.0)

TABLE: tuple[Device, ...] = (
    _device(
        "t4", "NVIDIA T4", 320, "NVIDIA T4 Tensor Core GPU datasheet", dense={"fp32": 8.1, "fp16": 65.0, "int8": 130.0}
    ),
    _device(
        "a10",
        "NVIDIA A10",
        600,
        "NVIDIA A10 Tensor Core GPU datasheet",
        dense={"fp32": 31.2, "tf32": 62.5, "fp16": 125.0, "bf16": 125.0, "int8": 250.0},
        sparse={"tf32": 125.0, "fp16": 250.0, "bf16": 250.0, "int8": 500.0},
    ),
    _device(
        "a100-40gb",
        "NVIDIA A100 40GB",
        1555,
        "NVIDIA A100 Tensor Core GPU datasheet (40GB)",
        dense=_A100,
        sparse=_A100_SPARSE,
    ),
    _device(
        "a100-80gb",
        "NVIDIA A100 80GB SXM",
        2039,
        "NVIDIA A100 Tensor Core GPU datasheet (80GB)",
        dense=_A100,
        sparse=_A100_SPARSE,
        note="the PCIe card has 1935 GB/s",
    ),
    _device(
        "l4",
        "NVIDIA L4",
        300,
        "NVIDIA L4 Tensor Core GPU datasheet",
        dense=_dense_half(30.3, _L4_SPARSE),
        sparse=_L4_SPARSE,
        note="the data sheet gives tensor-core peaks with sparsity only; dense is half",
    ),
    _device(
        "l40s",
        "NVIDIA L40S",
        864,
        "NVIDIA L40S datasheet",
        dense={"fp32": 91.6, "tf32": 183.0, "fp16": 362.05, "bf16": 362.05, "fp8": 733.0, "int8": 733.0},
        sparse={"tf32": 366.0, "fp16": 733.0, "bf16": 733.0, "fp8": 1466.0, "int8": 1466.0},
    ),
    _device(
        "rtx3090",
        "NVIDIA GeForce RTX 3090",
        936,
        "NVIDIA Ampere GA102 GPU Architecture whitepaper v2.0, appendix A",
        dense={"fp32": 35.6, "tf32": 35.6, "fp16": 71.0, "bf16": 71.0, "int8": 284.0},
        sparse={"tf32": 71.0, "fp16": 142.0, "bf16": 142.0, "int8": 568.0},
        note="fp16 with fp32 accumulation; with fp16 accumulation the data sheet gives 142 dense, 284 sparse",
    ),
    _device(
        "rtx4090",
        "NVIDIA GeForce RTX 4090",
        1008,
        "NVIDIA Ada GPU Architecture whitepaper, appendix A",
        dense={"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3, "int8": 660.6},
        sparse={"tf32": 165.2, "fp16": 330.4, "bf16": 330.4, "fp8": 660.6, "int8": 1321.2},
        note="fp16 and fp8 with fp32 accumulation; with fp16 accumulation both are twice that",
    ),
    _device(
        "rtx5080",
        "NVIDIA GeForce RTX 5080",
        960,
        _RTX_BLACKWELL,
        dense={"fp32": 56.3, "tf32": 56.3, "fp16": 112.6, "bf16": 112.6, "fp8": 225.1, "int8": 450.2},
        sparse={"tf32": 112.6, "fp16": 225.1, "bf16": 225.1, "fp8": 450.2, "int8": 900.4},
        note="fp16 and fp8 with fp32 accumulation; with fp16 accumulation both are twice as fast",
    ),
    _device(
        "rtx5090",
        "NVIDIA GeForce RTX 5090",
        1792,
        _RTX_BLACKWELL,
        dense={"fp32": 104.8, "tf32": 104.8, "fp16": 209.5, "bf16": 209.5, "fp8": 419.0, "int8": 838.0},
        sparse={"tf32": 209.5, "fp16": 419.0, "bf16": 419.0, "fp8": 838.0, "int8": 1676.0},
        note="fp16 and fp8 with fp32 accumulation; with fp16 accumulation both are twice as fast",
    ),
    _device(
        "h100-pcie",
        "NVIDIA H100 PCIe",
        2000,
        "NVIDIA H100 Tensor Core GPU datasheet (PCIe)",
        dense=_dense_half(51.0, _H100_PCIE_SPARSE),
        sparse=_H100_PCIE_SPARSE,
        note=_HOPPER,
    ),
    _device(
        "h100-sxm",
        "NVIDIA H100 SXM",
        3350,
        "NVIDIA H100 Tensor Core GPU datasheet (SXM)",
        dense=_dense_half(67.0, _H100_SXM_SPARSE),
        sparse=_H100_SXM_SPARSE,
        note=_HOPPER,
    ),
    _device(
        "h200",
        "NVIDIA H200 SXM",
        4800,
        "NVIDIA H200 Tensor Core GPU datasheet (SXM)",
        dense=_dense_half(67.0, _H100_SXM_SPARSE),
        sparse=_H100_SXM_SPARSE,
        note=_HOPPER,
    ),
    _device(
        "b200",
        "NVIDIA B200 (HGX)",
        7700,
        "NVIDIA Blackwell datasheet (HGX B200, one GPU)",
        dense=_dense_half(75.0, _B200_SPARSE),
        sparse=_B200_SPARSE,
        note="the data sheet gives tensor-core peaks with sparsity; dense is half. Early ones gave 8 TB/s",
    ),
    _device(
        "orin-agx-64gb",
        "NVIDIA Jetson AGX Orin 64GB",
        204.8,
        "NVIDIA Jetson AGX Orin Series technical brief v1.2",
        dense=_ampere(5.3, 85.0),
        sparse={"tf32": 42.5, "fp16": 85.0, "bf16": 85.0, "int8": 170.0},
        note=_JETSON,
    ),
    _device(
        "orin-nx-16gb",
        "NVIDIA Jetson Orin NX 16GB",
        102.4,
        "NVIDIA Jetson Orin NX Series datasheet",
        dense=_ampere(1.88, 30.0),
        sparse={"tf32": 15.0, "fp16": 30.0, "bf16": 30.0, "int8": 60.0},
        note=f"{_JETSON}. Before the Super mode of JetPack 6.2",
    ),
    _device(
        "orin-nano-8gb",
        "NVIDIA Jetson Orin Nano 8GB",
        68.0,
        "NVIDIA Jetson Orin Nano Series datasheet",
        dense=_ampere(1.28, 20.0),
        sparse={"tf32": 10.0, "fp16": 20.0, "bf16": 20.0, "int8": 40.0},
        note=f"{_JETSON}. Before the Super mode of JetPack 6.2",
    ),
    _device(
        "thor-t5000",
        "NVIDIA Jetson T5000 (Jetson AGX Thor)",
        273,
        "NVIDIA Jetson Thor Series Modules datasheet (T5000)",
        dense=_dense_half(8.06, _THOR_SPARSE),
        sparse=_THOR_SPARSE,
        note="2070 is the headline figure, sparse FP4; FP8 and INT8 are half of it, FP16 a quarter, dense half again",
    ),
    _device(
        "orin-dla",
        "one DLA of NVIDIA Jetson AGX Orin 64GB",
        204.8,
        "NVIDIA Deep-Learning-Accelerator-SW, README: two DLAs have 105 sparse INT8 TOPS in power mode MAXN",
        dense={"int8": 26.25},
        sparse={"int8": 52.5},
        note="dense is half; the GPU shares the memory. No peak for fp16 is given, in which softmax and slices run",
    ),
    _device(
        "hexagon-x-elite",
        "Hexagon NPU of Qualcomm Snapdragon X Elite",
        136,
        "Qualcomm's announcement of Snapdragon X Elite, 2023-10 (45 TOPS; LPDDR5x, 8 x 16 bits at 8533 MT/s, 136 GB/s)",
        dense={"int8": 45.0},
        note="Qualcomm publishes no figure for a phone's NPU, and none for 16 bits",
    ),
    _device(
        "raspberry-pi-5",
        "Raspberry Pi 5 (four Cortex-A76 at 2.4 GHz)",
        17.1,
        "Raspberry Pi 5 product brief (LPDDR4X-4267, four Cortex-A76 at 2.4 GHz); operations a clock: Arm's Software "
        "Optimization Guide of Neoverse N1, its counterpart for servers, as in LLVM's AArch64SchedNeoverseN1.td",
        dense={precision: 4 * 2.4 * flops / 1e3 for precision, flops in _ARM_FLOPS.items()},
        note="two Neon pipelines of 128 bits a core, both take FMLA and SDOT; bandwidth of 32 bits at 4267 MT/s",
    ),
    _device(
        "cortex-x3",
        "one Cortex-X3 at 3.2 GHz, of a phone's CPU (Qualcomm Snapdragon 8 Gen 2)",
        67.2,
        "Qualcomm's announcement of Snapdragon 8 Gen 2, 2022-11 (Cortex-X3 at 3.2 GHz, LPDDR5X at 4200 MHz); "
        "operations a clock: Arm's Software Optimization Guide of Neoverse V2, its counterpart for servers, issue 3.0",
        dense={precision: 3.2 * 2 * flops / 1e3 for precision, flops in (_ARM_FLOPS | {"int8": 128}).items()},
        note="four Neon pipelines of 128 bits take FMLA, and SMMLA for int8 (SDOT has half of its rate); bandwidth of "
        "64 bits; the other cores of the phone are not counted",
    ),
    _xeon("xeon-8380", "Intel Xeon Platinum 8380 (Ice Lake)", 40, 3.4, 204.8, _VNNI_FLOPS),
    _xeon("xeon-8480", "Intel Xeon Platinum 8480+ (Sapphire Rapids)", 56, 3.8, 307.2, _AMX_FLOPS),
    _xeon("xeon-8592", "Intel Xeon Platinum 8592+ (Emerald Rapids)", 64, 3.9, 358.4, _AMX_FLOPS),
)

_DEVICE_ALIASES = {
    "rpi5": "raspberry-pi-5",
    "dla": "orin-dla",
    "hexagon": "hexagon-x-elite",
    "a100": "a100-80gb",
    "h100": "h100-sxm",
    "orin": "orin-agx-64gb",
    "orin-agx": "orin-agx-64gb",
    "orin-nx": "orin-nx-16gb",
    "orin-nano": "orin-nano-8gb",
    "thor": "thor-t5000",
    "agx-thor": "thor-t5000",
    "xeon-8480+": "xeon-8480",
    "xeon-8592+": "xeon-8592",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5080": "rtx5080",
    "5090": "rtx5090",
}

# Names that `roofline(device=...)` accepts, besides short forms (`a100`, `h100`, `orin`, ...).
DEVICE_NAMES: tuple[str, ...] = (*(device.name for device in TABLE), "machine")


def table_device(name: str) -> Device:
    key = name.strip().lower().replace(" ", "-").replace("_", "-")
    by_name = {device.name: device for device in TABLE}
    key = _DEVICE_ALIASES.get(key, key)
    if key not in by_name:
        near = near_misses(key, (*DEVICE_NAMES, *_DEVICE_ALIASES)) or "."
        raise RooflineError(f"unknown device {name!r}{near} Allowed: {', '.join(DEVICE_NAMES)}")
    return by_name[key]
