"""Pruning: masks or channels, fine-tuning, quantization with masks held."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from torch import Tensor, nn

from compress.audit.onnx import audit_sparsity
from compress.data.base import BatchPlan
from compress.errors import AuditError, ModelError, RooflineError, RunError
from compress.export.names import module_prefix
from compress.files import read_json, write_json
from compress.models.by_name import read_state_dict
from compress.pipeline.run import Run, layer_weight, stem
from compress.pipeline.steps.training import facts_of, save_variant, train
from compress.roofline_model import sparse_bound
from compress.sparsity import Pattern, SparsitySpec, check_sparsity_spec
from compress.sparsity.eligibility import NOTEWORTHY_CHANNELS, large_enough
from compress.sparsity.parametrization import MaskSchedule, apply_masks, masked_layers, squash_masks
from compress.sparsity.sparsifier import mask_options, prune_channels, sparsify
from compress.training.checkpoint import load_model, save_model
from compress.training.optim import recalibrate_batchnorm
from compress.variants import Variant

GPU = "a100"  # device of the report's bound: the first kind with 2:4 tensor cores

RECALIBRATION_IMAGES = 1024  # training images for BatchNorm if no training follows

_MASK = ".parametrizations.weight.0.mask"


def sparse_step(run: Run, float_model: nn.Module) -> nn.Module:
    """Pruned and fine-tuned, as a plain module.

    Without fine-tuning, BatchNorm is recalibrated after masks by magnitude.
    """
    spec = run.sparsity
    pattern = check_sparsity_spec(spec)
    model = copy.deepcopy(float_model)
    if pattern.kind == "channel":
        report = prune_channels(model, spec, example_inputs=run.example.to(run.device), progress=run.progress)
        write_json(run.path("sparsity.json"), asdict(report))
    finished, tuning = run.folder.done("sparse"), run.recipe.finetune
    if pattern.kind != "channel" and not finished:
        _mask(run, model, float_model, spec, pattern)
    if finished:
        load_model(model, run.path("sparse.safetensors"))
        return model.eval()
    _note(run)
    if tuning.epochs == 0:
        model.to(run.device)
        if pattern.kind == "channel" or spec.saliency == "magnitude":
            recalibrate_batchnorm(model, _recalibration_images(run))
    schedule = MaskSchedule(model, spec) if masked_layers(model) else None
    after_step = schedule.after_step if schedule is not None else None
    first = run.recipe.train.epochs
    done = train(
        run, model.train(), tuning, Variant.SPARSE, teacher=float_model, first_epoch=first, after_step=after_step
    )
    if schedule is not None:
        squash_masks(model)
    save_variant(run, Variant.SPARSE, model, **facts_of(done, run.task.metric))
    return model.eval()


def _mask(run: Run, model: nn.Module, dense: nn.Module, spec: SparsitySpec, pattern: Pattern) -> None:
    path = run.path("masked.safetensors")
    if not run.folder.done("mask"):
        report = sparsify(
            model,
            spec,
            example_inputs=run.example.to(run.device),
            batches=[x.to(run.device) for x in run.batches("train", 32, limit=spec.calibration_images)],
            progress=run.progress,
        )
        document = asdict(report) | {"at_most": _at_most(run, dense, report.masked, pattern)}

        def write() -> None:
            save_model(model, path, {"step": "mask", "recipe": run.recipe.digest()})
            write_json(run.path("sparsity.json"), document)
            run.finish("mask", density=report.density)

        run.processes.on_main(write)
        return
    masks = {key.removesuffix(_MASK): mask for key, mask in read_state_dict(path).items() if key.endswith(_MASK)}
    apply_masks(model, masks, pattern=str(pattern), **mask_options(spec))
    load_model(model, path)


def _at_most(run: Run, dense: nn.Module, masked: tuple[str, ...], pattern: Pattern) -> str:
    if str(pattern) != "2:4":
        return f"no engine is faster for {pattern}"
    precision = "fp16" if run.recipe.quantization is None else "int8"
    try:
        bound = sparse_bound(
            dense,
            run.example.to(run.device),
            masked=masked,
            device=GPU,
            precision=precision,
            batch_size=run.recipe.data.batch_size,
        )
    except (ModelError, RooflineError) as error:
        return f"how much faster 2:4 can make the network is not known: {error}"
    shapes = {path: tuple(layer_weight(dense, path).shape) for path in masked}
    large = bound.speedup_with([path for path, shape in shapes.items() if large_enough(shape)])
    return (
        f"2:4 makes the network at most {bound.speedup:.2f} times as fast ({GPU}, {precision}, batch "
        f"{bound.batch_size}, from its roofline), {large:.2f} where layers of fewer than {NOTEWORTHY_CHANNELS} "
        "channels stay dense; engines for CPUs have no 2:4 kernels (inspect model --sparsity lists the layers)"
    )


def _note(run: Run) -> None:
    path = run.path("sparsity.json")
    try:
        known = dict(read_json(path))
    except (OSError, TypeError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}. Restore it, or begin the run anew (--out)") from error
    refused = (known.get("permutation") or {}).get("refused")
    notes = [known.get("at_most"), f"channels were not permuted: {refused}" if refused else None]
    if run.recipe.finetune.epochs == 0:
        second = run.sparsity.saliency == "hessian"
        done = "its weights updated" if second else "its BatchNorm statistics measured again"
        notes.append(
            f"finetune.epochs is 0: the network was not trained on, only {done} on images of the training split; a "
            "few epochs bring back most of what is lost"
        )
    run.notes += [note for note in notes if note]


def _recalibration_images(run: Run) -> Iterator[Tensor]:
    """A sample of training images, alike on every process."""
    split = run.data.train
    sample = split.order(BatchPlan(batch_size=1, limit=min(RECALIBRATION_IMAGES, len(split))))
    count = max(1, len(sample) // 32)
    return (split.load(sample[i::count], epoch=None, device=run.device)[0] for i in range(count))


def zeros_of(run: Run, model: nn.Module) -> Mapping[str, Tensor]:
    """Present zeros of masked layers; none of removed channels."""
    path = run.path("masked.safetensors")
    if not path.is_file():
        return {}
    layers = [key.removesuffix(_MASK) for key in read_state_dict(path) if key.endswith(_MASK)]
    return {layer: layer_weight(model, layer).detach() != 0 for layer in layers}


def check_pattern(run: Run) -> None:
    pattern = check_sparsity_spec(run.sparsity)
    if pattern.kind != "nm":
        return
    layers = [key.removesuffix(_MASK) for key in read_state_dict(run.path("masked.safetensors")) if key.endswith(_MASK)]
    rows = []
    for name in (stem(variant, target) for variant, target in run.networks if variant.is_sparse):
        audit = audit_sparsity(run.path(f"{name}.onnx"), pattern.n, pattern.m)
        for layer in layers:
            row = next((r for r in audit if r.name.startswith(module_prefix(layer))), None)
            if row is None or row.violations:
                held = "is not in the file" if row is None else f"breaks {pattern} in {row.violations} groups"
                raise AuditError(f"{name}.onnx: {layer} {held}; the masks were lost on the way to the file")
            rows.append({"variant": name, **asdict(row)})
    write_json(run.path("sparsity_audit.json"), rows)
