"""The networks of a run for engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from compress.engines import Engine, build_engine
from compress.engines.registry import target_of
from compress.errors import ModelError
from compress.quantization.quantizer import Quantizer
from compress.quantization.spec import Target
from compress.variants import Variant


def stem(variant: str, target: Target | None = None) -> str:
    """The name of a network's files; None is the first target.

    >>> stem("ptq"), stem("ptq", "openvino")
    ('ptq', 'ptq.openvino')
    """
    return str(variant) if target is None else f"{variant}.{target}"


def layer_weight(model: nn.Module, path: str) -> Tensor:
    """Return a layer's weight, parametrized or not."""
    weight = model.get_submodule(path).weight
    if not isinstance(weight, Tensor):
        raise ModelError(f"{path}.weight is a {type(weight).__name__}, not a tensor: name a layer that has a weight")
    return weight


def weight_quantizer(model: nn.Module, path: str) -> Quantizer:
    """The quantizer of a layer's weight."""
    quantizer = model.get_submodule(path).weight_quantizer
    if not isinstance(quantizer, Quantizer):
        raise ModelError(f"{path} has no quantized weight: name a layer that the placement quantizes")
    return quantizer


def torch_label(variant: Variant, target: Target | None = None) -> str:
    """A network's label in torch."""
    if not variant.is_quantized:
        return "torch"
    return f"torch (fake quantization{f', {target}' if target else ''})"


@dataclass(frozen=True, kw_only=True)
class NetworkFiles:
    """One network to be measured.

    Attributes:
        file: ONNX, first target.
        further: other targets' files.
        in_torch: makes the engine `torch` with a number of threads; None without a module.
    """

    file: Path
    further: Mapping[Target, Path] = field(default_factory=dict)
    in_torch: Callable[[int | None], Engine] | None = None

    def of(self, engine: str) -> Path:
        """An engine's file, else the first target's."""
        target = target_of(engine)
        return self.file if target is None else self.further.get(target, self.file)

    def engine(
        self, name: str, *, batch_size: int | None = None, threads: int | None = None, precision: str | None = None
    ) -> Engine:
        """Load the network into an engine."""
        if name == "torch" and self.in_torch is not None:
            return self.in_torch(threads)
        return build_engine(self.of(name), name, batch_size=batch_size, threads=threads, precision=precision)
