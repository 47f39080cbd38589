"""Facts of this machine; settings of a process, changed for a while."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

NO_VNNI = (
    "This processor has no VNNI: OpenVINO adds products of bytes in 16 bits, which saturate, so that its results are "
    "not the file's. Weights of 7 bits are exact on it (`quantization.weights.num_bits: 7`, the default "
    "for target openvino there), the engine `onnxruntime` is with 8, and accuracy that is measured here "
    "does not hold for processors with VNNI"
)


def core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count() -> int:
    # For libraries that count the machine's cores, not those that this process may use; 0 = their own choice.
    cores = core_count()
    return cores if cores < (os.cpu_count() or 1) else 0


def read_fact(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def processor_name() -> str:
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", read_fact("/proc/cpuinfo"), re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def instruction_sets() -> frozenset[str]:
    """The Linux kernel's names; empty elsewhere."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", read_fact("/proc/cpuinfo"), re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()


def sums_bytes_in_16_bits() -> bool:
    """True for x86 without VNNI: pairs of INT8 products saturate in 16 bits.

    VPMADDUBSW: 2 * 255 * 64 fits, 2 * 255 * 65 does not (Intel Software Developer's Manual, volume 2, PMADDUBSW).
    """
    features = instruction_sets()
    return "avx2" in features and not features & {"avx_vnni", "avx512_vnni"}


def nvidia_driver() -> str:
    """The version of the GPUs' driver, such as 580.159.04; "" without one."""
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", read_fact("/proc/driver/nvidia/version"))
    return found.group(1) if found else ""


def memory_bytes() -> int | None:
    """The memory of the machine in bytes; None where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def load_average() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended unwaited does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except (OSError, IndexError, OverflowError):  # another user's process, no /proc, or no such number
        return True


@contextmanager
def restored(get: Callable[[], T], put: Callable[[T], object], value: T) -> Iterator[None]:
    """A setting of the process is `value` within the block."""
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)
