"""The steps that take weights away: masks or channels, fine-tuning, and quantization with the masks held."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from torch import Tensor, nn

from compress.errors import AuditError
from compress.export.audit import audit_sparsity
from compress.files import write_json
from compress.pipeline.models import keep, train
from compress.pipeline.run import Run
from compress.sparsity.channel import prune_channels
from compress.sparsity.parametrization import apply_masks, masked_layers, squash_masks
from compress.sparsity.schedule import MaskSchedule
from compress.sparsity.sparsifier import sparsify
from compress.sparsity.spec import Pattern, SparsitySpec, check_sparsity_spec
from compress.training import load_model, save_model
from compress.weights import read_state_dict

_MASK = ".parametrizations.weight.0.mask"


def sparse_step(run: Run, float_model: nn.Module) -> nn.Module:
    """The float network with weights or channels taken away, fine-tuned; a plain module again."""
    spec = cast(SparsitySpec, run.recipe.sparsity)
    pattern = check_sparsity_spec(spec)
    model = copy.deepcopy(float_model)
    if pattern.kind == "channel":
        report = prune_channels(model, spec, example_inputs=run.example.to(run.device), progress=run.progress)
        write_json(run.path("sparsity.json"), asdict(report))
    if run.folder.done("sparse"):
        load_model(model, run.path("sparse.safetensors"))
        return model.eval()
    if pattern.kind != "channel":
        _mask(run, model, spec, pattern)
    schedule = MaskSchedule(model, spec) if masked_layers(model) else None
    after_step = schedule.after_step if schedule is not None else None
    done = train(run, model.train(), run.recipe.finetune, "sparse", teacher=float_model, after_step=after_step)
    if schedule is not None:
        squash_masks(model)
    keep(run, "sparse", model, top1=done.final.top1, images_per_s=done.images_per_s, seconds=done.seconds)
    return model.eval()


def _mask(run: Run, model: nn.Module, spec: SparsitySpec, pattern: Pattern) -> None:
    """Mask the network, or take the masks that a stopped run had found: a timed search does not find them twice."""
    path = run.path("masked.safetensors")
    if not run.folder.done("mask"):
        report = sparsify(
            model,
            spec,
            example_inputs=run.example.to(run.device),
            batches=[x.to(run.device) for x in run.batches("train", 32, limit=spec.calibration_images)],
            progress=run.progress,
        )
        if report.permutation is not None and report.permutation.refused:
            run.notes.append(f"channels were not permuted: {report.permutation.refused}")

        def write() -> None:
            save_model(model, path, {"step": "mask", "recipe": run.recipe.digest()})
            write_json(run.path("sparsity.json"), asdict(report))
            run.folder.finish("mask", density=report.density)

        run.processes.on_main(write)
        return
    masks = {key.removesuffix(_MASK): mask for key, mask in read_state_dict(path).items() if key.endswith(_MASK)}
    apply_masks(model, masks, pattern=str(pattern), straight_through=spec.schedule == "sr-ste")
    load_model(model, path)


def zeros_of(run: Run, model: nn.Module) -> Mapping[str, Tensor]:
    """Masks that keep at zero what is zero now, of the layers that the run masked; none after channel pruning."""
    path = run.path("masked.safetensors")
    if not path.is_file():
        return {}
    layers = [key.removesuffix(_MASK) for key in read_state_dict(path) if key.endswith(_MASK)]
    return {layer: cast(Any, model.get_submodule(layer)).weight.detach() != 0 for layer in layers}


def check_pattern(run: Run, variants: list[str]) -> None:
    """Refuse an exported file whose constants break the n:m pattern of the masked layers.

    Raises:
        AuditError: names the operation and how many groups hold too many values.
    """
    pattern = check_sparsity_spec(cast(SparsitySpec, run.recipe.sparsity))
    if pattern.kind != "nm":
        return
    layers = [key.removesuffix(_MASK) for key in read_state_dict(run.path("masked.safetensors")) if key.endswith(_MASK)]
    rows = []
    for variant in variants:
        audit = audit_sparsity(run.path(f"{variant}.onnx"), pattern.n, pattern.m)
        found = {row.name: row for row in audit}
        for layer in layers:
            row = next((r for name, r in found.items() if name.startswith(f"/{layer.replace('.', '/')}/")), None)
            if row is None or row.violations:
                held = "is not in the file" if row is None else f"breaks {pattern} in {row.violations} groups"
                raise AuditError(f"{variant}.onnx: {layer} {held}; the masks were lost on the way to the file")
            rows.append({"variant": variant, **asdict(row)})
    write_json(run.path("sparsity_audit.json"), rows)
