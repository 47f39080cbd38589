"""A chain that ends in a quantizer with a learned range, as one operation."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from compress.kernels.dispatch import Kernels
from compress.kernels.epilogue import Epilogue
from compress.kernels.learned_quantize import learned_quantize
from compress.qat_fusion.product import ACTIVATIONS, epilogue_of, product
from compress.quantization.learned import LearnedQuantizer


def is_learned(quantizer: nn.Module) -> bool:
    """Whether a quantizer learns its range."""
    return type(quantizer) is LearnedQuantizer


class FusedLearnedModule(nn.Module):
    """layer -> (add) -> (clipping activation) -> quantizer; the layer and the quantizer are the model's own.

    Args:
        layer: convolution or linear layer; None = the chain begins after another operation, such as a batch norm.
        activation: `relu`, `relu6`, or "".
        quantizer: of the result.
        kernels: as of `fuse_for_training`.
    """

    is_quantizer = True

    def __init__(
        self, layer: nn.Module | None, activation: str, quantizer: LearnedQuantizer, kernels: Kernels | None
    ) -> None:
        super().__init__()
        self.layer, self.activation, self.quantizer = layer, activation, quantizer
        self.kernels: Kernels | None = kernels
        self.epilogue: Epilogue = epilogue_of(layer, activation, quantizer)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The quantized result.

        Args:
            x: input of the layer; without a layer, the tensor that is activated and quantized.
            residual: shape of the layer's result, added to it.
        """
        quantizer, layer = self.quantizer, cast(Any, self.layer)
        if not (quantizer.enabled and quantizer.calibrator is None and quantizer.ready):
            y = x if layer is None else layer(x)
            y = y if residual is None else y + residual
            return cast(Tensor, quantizer(ACTIVATIONS[self.activation](y) if self.activation else y))
        bias = None
        if layer is not None:
            x, bias = product(layer, x, None, None, self.kernels), layer.bias
        factor = quantizer.gradient_factor(x)
        return learned_quantize(
            x, quantizer.amax, self.epilogue, factor, bias=bias, residual=residual, kernels=self.kernels
        )
