"""Tensor descriptors of a matrix product of codes, by which a kernel loads or stores a tile (TMA)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from compress.kernels.triton.int8_epilogue import Finish, Outputs
from compress.kernels.triton.int8_product import Weight


class ProductTile(Protocol):
    """The sizes that the tile of every product has."""

    @property
    def rows(self) -> int:
        """Output pixels."""

    @property
    def columns(self) -> int:
        """Output channels."""

    @property
    def depth(self) -> int:
        """Input channels of one product."""


def describe_operands(
    x: Tensor, weight: Weight, columns: int, tile: ProductTile
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return the descriptors of the pixels and of the filters.

    - `x`: int8 (rows, K), channels dense, rows at multiples of 16 bytes.
    - `weight`: of one tap and one group.
    """
    rows, channels = x.shape[0], weight.codes.shape[-1]
    return (
        TensorDescriptor(x, [rows, channels], [x.stride(0), 1], [tile.rows, tile.depth]),
        TensorDescriptor(weight.codes, [columns, channels], [channels, 1], [tile.columns, tile.depth]),
    )


def describe_results(
    finish: Finish, outputs: Outputs, rows: int, columns: int, tile: ProductTile
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return the descriptors of the residual and of the codes; without a residual both are the same.

    `outputs` are in rows at multiples of 16 bytes.
    """

    def described(tensor: Tensor, pitch: int) -> TensorDescriptor:
        return TensorDescriptor(tensor, [rows, columns], [pitch, 1], [tile.rows, tile.columns])

    codes = described(outputs.codes, outputs.codes_pitch)
    return described(outputs.residual, outputs.residual_pitch) if finish.kind.residual else codes, codes
