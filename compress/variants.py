"""The networks that a run can make, as one enum: every file, table and figure names them by it."""

from __future__ import annotations

from enum import StrEnum


class Variant(StrEnum):
    """One network of a run, in the order in which a run makes them.

    A member is a string and equals its value, which is the name of its files, its value in `metrics.json` and its
    value in an ONNX file's metadata. Tables of metrics may hold further names, those of foreign ONNX files;
    `Variant.named` returns None for them.

    >>> Variant("sparse-qat").is_sparse, Variant.named("my_model")
    (True, None)
    """

    FLOAT = "float"
    PTQ = "ptq"
    QAT = "qat"
    SPARSE = "sparse"
    SPARSE_PTQ = "sparse-ptq"
    SPARSE_QAT = "sparse-qat"

    @classmethod
    def named(cls, name: str) -> Variant | None:
        """Return the variant of that name, or None where no variant has it."""
        return next((variant for variant in cls if variant == name), None)

    @property
    def is_sparse(self) -> bool:
        """True for networks whose weights were masked or whose channels were removed."""
        return self in {Variant.SPARSE, Variant.SPARSE_PTQ, Variant.SPARSE_QAT}

    @property
    def is_quantized(self) -> bool:
        """True for networks that hold quantizers."""
        return self not in {Variant.FLOAT, Variant.SPARSE}

    @property
    def trained_from(self) -> Variant | None:
        """The variant that quantization-aware training starts from; None for variants that it does not make."""
        return {Variant.QAT: Variant.PTQ, Variant.SPARSE_QAT: Variant.SPARSE_PTQ}.get(self)

    @property
    def label(self) -> str:
        """The name in reports and figures, such as `PTQ`."""
        return _LABELS[self]

    @property
    def step(self) -> str:
        """Name of the pipeline step that makes the network: `train` for the float network, else the variant's."""
        return "train" if self is Variant.FLOAT else self.value

    @property
    def weights_file(self) -> str:
        """Name of the file in the run folder that holds the weights."""
        return f"{self.value}.safetensors"

    @property
    def onnx_file(self) -> str:
        """Name of the exported file in the run folder."""
        return f"{self.value}.onnx"


QUANTIZED: frozenset[str] = frozenset(variant for variant in Variant if variant.is_quantized)
"""The variants that hold quantizers; a string is one of them if it names one."""

_LABELS = {
    Variant.FLOAT: "float",
    Variant.PTQ: "PTQ",
    Variant.QAT: "QAT",
    Variant.SPARSE: "sparse",
    Variant.SPARSE_PTQ: "sparse PTQ",
    Variant.SPARSE_QAT: "sparse QAT",
}
