"""QAT, called from any loop."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn

from compress.export.onnx import export_onnx
from compress.graph.inputs import Batches, Inputs, as_inputs, each_input
from compress.quantization import QuantSpec
from compress.quantization.learned import freeze_scales, learn_scales
from compress.quantization.ptq.quantize import quantize
from compress.training import QATSpec
from compress.training.checkpoint import WeightAverage
from compress.training.optim import drop_frozen_gradients, freeze_batchnorm


@dataclass(kw_only=True)
class QuantizationCycle:
    """The parts of quantization-aware training that a loop must call, in this order.

    Attributes:
        example_inputs: inputs that the model is traced and exported with.
        batches: calibration data, as for `compress.quantize`.
        qat: only `scales`, `ema_decay`, `freeze_batchnorm_epoch` and `freeze_ranges_epoch` are followed.
        export_to: ONNX file to write at the end; None = none.
        export: further arguments of `export_onnx`, such as {"precision": "fp16"}.

    Examples:
        >>> cycle = compress.QuantizationCycle(example_inputs=images[:1], batches=batches)
        >>> qmodel = cycle.begin(model)
        >>> optimizer = torch.optim.SGD(qmodel.parameters(), lr=0.001)
        >>> nn.functional.cross_entropy(qmodel(images), targets).backward()
        >>> cycle.before_step(0)
        >>> optimizer.step()
        >>> cycle.after_step(1)
        >>> cycle.end()  # with `export_to`, the path of the file
    """

    example_inputs: Inputs
    batches: Batches
    spec: QuantSpec | None = None
    qat: QATSpec = field(default_factory=QATSpec)
    export_to: Path | str | None = None
    export: dict[str, Any] = field(default_factory=dict)
    model: fx.GraphModule | None = None
    average: WeightAverage | None = None

    def begin(self, model: nn.Module) -> fx.GraphModule:
        """Return the model quantized and calibrated, for the optimizer; the model itself is not changed."""
        qmodel: fx.GraphModule = quantize(model, self.example_inputs, self.batches, spec=self.spec)
        if self.qat.scales == "learned":
            learn_scales(qmodel)
        self.model = qmodel.train()
        return self.model

    def epoch(self, epoch: int) -> None:
        """Freeze BatchNorm where `qat` says so; after `model.train()`. Epochs are counted from 0."""
        freeze_batchnorm(self._model(), self.qat, epoch)

    def before_step(self, epoch: int) -> None:
        drop_frozen_gradients(self._model(), self.qat, epoch)

    def after_step(self, step: int) -> None:
        """Take the weights of a step, counted from 1, into their mean."""
        if self.qat.ema_decay is None:
            return
        if self.average is None:  # the loop has moved the model to its device by now
            self.average = WeightAverage(self._model(), self.qat.ema_decay)
        self.average.update(step)

    def averaged(self) -> AbstractContextManager[None]:
        """Give the model its mean weights while the block runs."""
        return nullcontext() if self.average is None else self.average.swapped()

    def end(self) -> Path | None:
        """Install the mean weights, fix learned ranges, and export the file."""
        model = self._model()
        if self.average is not None:
            self.average.install()
        freeze_scales(model)
        model.eval()
        if self.export_to is None:
            return None
        device = next(model.parameters()).device
        try:
            return export_onnx(
                model.cpu(), each_input(Tensor.cpu, as_inputs(self.example_inputs)), self.export_to, **self.export
            )
        finally:
            model.to(device)

    def _model(self) -> fx.GraphModule:
        if self.model is None:
            raise RuntimeError("QuantizationCycle.begin was not called: it makes the quantized model")
        return self.model
