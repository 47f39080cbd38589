"""Forms of a network, built and audited."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from torch import Tensor, nn

from compress.audit.engine import EngineAudit, audit_listing
from compress.audit.files import parse_build_log
from compress.audit.roofline import engine_roofline, int8_choices
from compress.engines import build_engine
from compress.engines.tensorrt.build import build_tensorrt
from compress.engines.tensorrt.options import TensorRTOptions
from compress.errors import AuditError, CompressError, RecipeError
from compress.export.names import module_of
from compress.export.onnx import export_onnx
from compress.measure.parity import compare_logits
from compress.quantization import QuantSpec, Rule
from compress.quantization.ptq.quantize import quantize
from compress.recipe.tree import Recipe, parse_recipe
from compress.support.progress import NoProgress, Progress, tracked

LEAST_AGREEMENT = 0.98  # share of images that must get the float network's class


@dataclass(frozen=True, kw_only=True)
class Form:
    """A way to export a network.

    Attributes:
        overrides: as of --set.
        where_it_pays: float layers where the device's roofs favour fp16.
    """

    name: str
    overrides: tuple[str, ...] = ()
    where_it_pays: bool = False


_HALF = "export.precision=fp16"
_BEHIND = "export.channel_scales=output"
_FP8 = (
    "quantization.weights.kind=e4m3",
    "quantization.weights.calibrator=max",
    "quantization.activations.kind=e4m3",
    "quantization.activations.calibrator=max",
)

FORMS: tuple[Form, ...] = (
    Form(name="fp32", overrides=("quantization=null", "export.precision=fp32")),
    Form(name="fp16", overrides=("quantization=null", _HALF)),
    Form(name="INT8, fp32 remainder", overrides=("export.precision=fp32",)),
    Form(name="INT8, fp16 remainder", overrides=(_HALF,)),
    Form(name="INT8, fp16, one scale a weight", overrides=(_HALF, "quantization.weights.axis=null")),
    Form(name="INT8, fp16, scales after", overrides=(_HALF, _BEHIND)),
    Form(name="INT8, fp16, scales after, sums both", overrides=(_HALF, _BEHIND, "quantization.residual=both")),
    Form(name="INT8, fp16, scales after, sums float", overrides=(_HALF, _BEHIND, "quantization.residual=none")),
    Form(name="FP8, fp16, scales after", overrides=(_HALF, _BEHIND, *_FP8)),
    Form(name="INT8 where it pays, else fp16", overrides=(_HALF, _BEHIND), where_it_pays=True),
)


@dataclass(frozen=True, kw_only=True)
class FormResult:
    """The result of a form on one compute capability.

    Attributes:
        least_ms: bound for the batch; None without a device.
        agreement, sqnr_db: against the float network in ONNX Runtime; None = cannot run.
    """

    form: str
    overrides: tuple[str, ...]
    sm: int
    kernels: int = 0
    activation_bytes: float = 0.0
    unknown_sizes: int = 0
    weight_bytes: float = 0.0
    int8_share: float = 0.0
    least_ms: float | None = None
    agreement: float | None = None
    sqnr_db: float | None = None
    error: str = ""


@dataclass(kw_only=True)
class Explorer:
    """A network and its images.

    Attributes:
        images: (N, 3, H, W).
        device: of bounds, or None.
    """

    model: nn.Module
    recipe: Recipe
    example: Tensor
    calibration: Sequence[Tensor]
    images: Tensor
    folder: Path
    engine: str = "tensorrt-rtx"
    options: TensorRTOptions = field(default_factory=TensorRTOptions)
    device: str | None = None
    batch_size: int = 32
    progress: Progress = field(default_factory=NoProgress)
    _quantized: dict[QuantSpec, nn.Module] = field(default_factory=dict, init=False)

    @cached_property
    def _reference(self) -> NDArray[Any]:
        return self._run(export_onnx(self.model, self.example, self.folder / "reference.onnx"))

    def explore(self, forms: Sequence[Form] = FORMS) -> tuple[FormResult, ...]:
        if not self.options.sms:
            raise RecipeError("exploring needs the compute capabilities to build for, such as 89,120")
        forms = [form for form in forms if self.device is not None or not form.where_it_pays]
        return tuple(result for form in tracked(self.progress, "explore", forms) for result in self._try(form))

    def _try(self, form: Form) -> list[FormResult]:
        recipe, overrides = with_overrides(self.recipe, form.overrides), form.overrides
        if form.where_it_pays:
            rules = json.dumps([asdict(rule) for rule in self._unprofitable(recipe)])
            overrides = (*overrides, f"quantization.rules={rules}")
            recipe = with_overrides(self.recipe, overrides)
        results = [FormResult(form=form.name, overrides=overrides, sm=sm) for sm in self.options.sms]
        try:
            path = self._export(recipe, form.name)
        except CompressError as error:
            return [replace(result, error=str(error)) for result in results]
        with suppress(CompressError):  # ONNX Runtime cannot run it
            parity = compare_logits(self._reference, self._run(path))
            results = [replace(r, agreement=parity.agreement, sqnr_db=parity.sqnr_db) for r in results]
        return [self._built(result, path) for result in results]

    def _built(self, result: FormResult, path: Path) -> FormResult:
        try:
            audit = self._build(path, result.sm)
        except CompressError as error:
            return replace(result, error=str(error))
        bound = self.device and engine_roofline(audit, device=self.device, batch_size=self.batch_size)
        return replace(
            result,
            kernels=audit.kernels,
            activation_bytes=audit.activation_bytes,
            unknown_sizes=audit.unknown_sizes,
            weight_bytes=audit.weight_bytes,
            int8_share=audit.share("int8", "fp8"),
            least_ms=bound.least_time_ms if bound else None,
        )

    def _export(self, recipe: Recipe, name: str) -> Path:
        model, spec = self.model, recipe.quantization
        if spec is not None:
            if spec not in self._quantized:
                own = spec.for_target("tensorrt" if "tensorrt" in spec.targets else None)
                self._quantized[spec] = quantize(self.model, self.example, self.calibration, spec=own)
            model = self._quantized[spec]
        return export_onnx(
            model,
            self.example,
            self.folder / f"{re.sub('[^a-z0-9]', '-', name.lower())}.onnx",
            precision=recipe.export.precision,
            dynamic_batch=recipe.export.dynamic_batch,
            opset=recipe.export.opset,
            channel_scales=recipe.export.channel_scales,
        )

    def _build(self, path: Path, sm: int) -> EngineAudit:
        out = path.with_suffix(f".sm{sm}.engine")
        built = build_tensorrt(path, self.engine, options=replace(self.options, sms=(sm,)), out=out)
        try:
            return audit_listing(parse_build_log(built.log), onnx=path)
        finally:
            out.unlink(missing_ok=True)  # tens of megabytes each; the log beside it has everything

    def _unprofitable(self, recipe: Recipe) -> list[Rule]:
        audit = self._build(self._export(recipe, "all INT8"), self.options.sms[0])
        choices = int8_choices(audit, device=str(self.device), batch_size=self.batch_size)
        nodes = {layer.name: layer.onnx_nodes for layer in audit.weighted}
        slow = [nodes[choice.name][0] for choice in choices if not choice.int8_pays and nodes[choice.name]]
        kept = recipe.quantization.rules if recipe.quantization is not None else ()
        return [*kept, *(Rule(match=module_of(node), enable=False) for node in slow)]

    def _run(self, path: Path) -> NDArray[Any]:
        with build_engine(path, "onnxruntime") as engine:
            name = engine.inputs[0].name
            batches = self.images.split(8)
            return np.concatenate([next(iter(engine.run({name: b.numpy()}).values())) for b in batches])


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    return parse_recipe(yaml.safe_load(recipe.to_yaml()), overrides, source="explore")


def best(results: Sequence[FormResult], *, least_agreement: float = LEAST_AGREEMENT) -> Mapping[int, FormResult]:
    """Return, for each compute capability, the near enough form that moves the fewest bytes."""
    fit = [r for r in results if not r.error and r.agreement is not None and r.agreement >= least_agreement]
    if not fit:
        raise AuditError(
            f"no form that was built agrees with the float network on {least_agreement:.0%} of the images; give more "
            "calibration images, or a lower bound"
        )
    return {
        sm: min((r for r in fit if r.sm == sm), key=lambda r: (r.unknown_sizes > 0, r.activation_bytes, r.kernels))
        for sm in dict.fromkeys(r.sm for r in fit)
    }
