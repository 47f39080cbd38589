"""The networks that a run can make."""

from __future__ import annotations

from enum import StrEnum


class Variant(StrEnum):
    """A network of a run, in the order of making.

    It equals its value: the name of its files, in `metrics.json` and in ONNX metadata. Names of foreign ONNX files are
    no members.

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
        """Masked, or with channels removed."""
        return self in {Variant.SPARSE, Variant.SPARSE_PTQ, Variant.SPARSE_QAT}

    @property
    def is_quantized(self) -> bool:
        """True for networks that hold quantizers."""
        return self not in {Variant.FLOAT, Variant.SPARSE}

    @property
    def trained_from(self) -> Variant | None:
        """What QAT starts from; None if not made by QAT."""
        return {Variant.QAT: Variant.PTQ, Variant.SPARSE_QAT: Variant.SPARSE_PTQ}.get(self)

    @property
    def label(self) -> str:
        """The name for people, such as `PTQ`."""
        return _LABELS[self]

    @property
    def step(self) -> str:
        """The pipeline step that makes it."""
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
