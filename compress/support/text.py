"""Numbers and names as people read them."""

from __future__ import annotations

import csv
import io
import math
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TypeGuard

from compress.variants import Variant

MISSING = "n/a"  # text of a number that was not measured

_DIGITS = 4  # significant digits of a metric whose unit is not percent
_TINY = 1e-4  # size below which such a metric is written with its power of ten

_ENGINES = {
    "openvino": "OpenVINO",
    "onnxruntime": "ONNX Runtime",
    "litert": "LiteRT",
    "executorch": "ExecuTorch",
    "coreml": "Core ML",
    "dla": "DLA",
    "qnn": "QNN",
    "tensorrt": "TensorRT",
    "tensorrt-rtx": "TensorRT-RTX",
    "tensorrt_rtx": "TensorRT-RTX",
    "tensorrt-lean": "TensorRT lean",
}


def plain(text: str) -> str:
    """`text` on one line, without control and direction characters."""
    kinds = ((c, unicodedata.category(c)) for c in str(text))
    return "".join(
        c if kind == "Zs" else " " if c.isspace() else c for c, kind in kinds if c.isspace() or kind[0] != "C"
    )


def display(name: str) -> str:
    """A variant or engine as people write it.

    >>> display("openvino (f32)"), display("sparse-ptq"), display("ptq.onnxruntime"), display("mine")
    ('OpenVINO (f32)', 'sparse PTQ', 'PTQ for ONNX Runtime', 'mine')
    """
    before, _, target = name.partition(".")
    variant = Variant.named(before)
    if variant is not None and (target in _ENGINES or before == name):
        return f"{variant.label} for {_ENGINES[target]}" if target else variant.label
    head, space, rest = name.partition(" ")
    return plain(_ENGINES.get(head, head) + space + rest)


def shorten(text: str, limit: int) -> str:
    """With its middle left out: names of layers differ at both ends.

    >>> shorten("features.denseblock4.denselayer16.conv2", 24)
    'features.de…yer16.conv2'
    """
    text = plain(text)
    if len(text) <= limit:
        return text
    half = (limit - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def significant(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits, without exponents, thousands parted.

    >>> [significant(v) for v in (0.01234, 3.14159, 98.76, 12345.6, None)]
    ['0.0123', '3.14', '98.8', '12,346', 'n/a']
    """
    if value is None:
        return MISSING
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def fixed(value: float | None, decimals: int, unit: str = "") -> str:
    """A number with so many decimals.

    >>> fixed(2.0449, 2, "×"), fixed(None, 2, "×")
    ('2.04×', 'n/a')
    """
    return MISSING if value is None else f"{value:,.{decimals}f}{unit}"


def scored(value: float | None, unit: str) -> str:
    """Without unit: two decimals of percent, else four digits.

    >>> scored(61.254, "%"), scored(0.012345, "m"), scored(1.15e-8, "mm"), scored(None, "%")
    ('61.25', '0.01235', '1.150e-08', 'n/a')
    """
    if unit == "%":
        return fixed(value, 2)
    if value is not None and 0 < abs(value) < _TINY:
        return f"{value:.{_DIGITS - 1}e}"
    return significant(value, _DIGITS)


def signed(value: float, unit: str = "%") -> str:
    """A change of a metric with its sign, in the digits of `scored`.

    >>> signed(-0.25), signed(0.001), signed(1.5), signed(-0.001, "m"), signed(0.0, "m")
    ('\u22120.25', '\u00b10.00', '+1.50', '\u22120.001000', '\u00b10')
    """
    size = scored(abs(value), unit)
    sign = "\u2212" if value < 0 else "+"
    return f"{sign if float(size.replace(',', '')) else '±'}{size}"


def in_bytes(value: float | None) -> str:
    """A size in decimal units.

    >>> [in_bytes(v) for v in (512, 25_600_000, None)]
    ['512 B', '25.6 MB', 'n/a']
    """
    if value is None:
        return MISSING
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= limit:
            return f"{significant(value / limit)} {unit}"
    return f"{value:.0f} B"


def image_size_text(size: int | Sequence[int]) -> str:
    """The side of square images, or the height and width of others.

    >>> image_size_text(224), image_size_text([360, 480])
    ('224 px', '360 x 480 px')
    """
    return f"{size if isinstance(size, int) else ' x '.join(map(str, size))} px"


def finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([columns, *rows])
    return buffer.getvalue()
