"""Networks of finished runs, and weights in files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from compress.data.base import Batch, DataSet, Split
from compress.data.load import class_count
from compress.data.preprocessing import Preprocessing
from compress.data.spec import DataSpec
from compress.engines.onnx_file import read_onnx
from compress.errors import CheckpointError, RunError, first_few
from compress.export.names import PREPROCESSING_KEY
from compress.files import expand_user
from compress.graph.trace import check_module
from compress.pipeline.again import chosen_variant, network
from compress.pipeline.folder import read_state, recipe_from_anywhere
from compress.pipeline.run import Run
from compress.pipeline.state import read_state_file
from compress.quantization.placement.decisions import Placement
from compress.quantization.spec import Target
from compress.training.checkpoint import load_model, save_model
from compress.training.tensor_file import read_tensors
from compress.variants import Variant

_GREY, _MEASURED = (0.5, 0.5, 0.5), "measured"


def load(
    path: Path | str, *, variant: str = "", target: Target | None = None, into: nn.Module | None = None
) -> nn.Module:
    """Load a network of a finished run, or the weights that `save` wrote; a run's data need not be here.

    Args:
        path: a run folder, or a .safetensors file.
        variant: `float`, `ptq`, `qat`, ...; "" = the best by the run's figures, the last where it has none.
        target: one of the run's; None = the first.
        into: takes the weights of a file, in place.

    Returns:
        In evaluation mode on the CPU; a quantized one is a GraphModule with `.placement`.

    Raises:
        RunError: no such network.
        CheckpointError: the file is damaged, does not fit `into`, or `into` is missing.

    Examples:
        >>> qmodel = compress.quantize(model, images[:1], batches)
        >>> path = compress.save(qmodel, "qat.safetensors")
        >>> again = compress.load(path, into=compress.insert_quantizers(model, images[:1]))
        >>> torch.equal(again(images), qmodel(images))
        True
    """
    path = expand_user(path)
    if path.is_dir():
        if into is not None:
            raise RunError(f"{path} is a run folder, which rebuilds its network: leave `into` out")
        chosen = chosen_variant(path, variant)
        return network(run_without_data(path), chosen, target).cpu().eval()
    if into is None:
        raise CheckpointError(f"{path} is no run folder; weights in a file need the module that takes them: into=model")
    try:
        load_model(into, path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_measured_hint(path)}") from error
    return into.eval()


def save(model: nn.Module, path: Path | str) -> Path:
    """Write a module's weights and quantizer ranges as safetensors with a checksum; whole or not at all.

    Code is not saved: a quantized network is rebuilt by `insert_quantizers` with the same model and spec.

    Args:
        model: any module, on any device.
        path: file that ends in .safetensors.

    Raises:
        CheckpointError: another ending, a lazy module, or the file cannot be written.
        ModelError: no module, or on the meta device.

    Examples:
        >>> print(compress.save(model, "float.safetensors"))
        float.safetensors
    """
    path = expand_user(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path} must end in .safetensors, which is the form that is written")
    check_module(model)
    placement = getattr(model, "placement", None)
    rules = placement.measured_rules if isinstance(placement, Placement) else ()
    return save_model(model, path, {_MEASURED: [rule.match for rule in rules]} if rules else None)


def _measured_hint(path: Path) -> str:
    layers = read_tensors(path, "model").data.get(_MEASURED) or []
    if not layers:
        return ""
    return (
        f". Calibration images left {len(layers)} layers float in it ({first_few(layers)}): give their rules, "
        "qmodel.placement.measured_rules of the network that was saved, to insert_quantizers in spec.rules"
    )


def run_without_data(folder: Path) -> Run:
    """A finished run with black images for data, to rebuild its networks."""
    recipe, state = recipe_from_anywhere(folder), read_state_file(folder)
    kept = (state.data or {}).get("val", {}).get("labels")
    labels = tuple(kept) if kept else tuple(str(number) for number in range(class_count(recipe.data)))
    recipe = replace(recipe, model=replace(recipe.model, weights=None), data=replace(recipe.data, classes=labels))
    split = BlankSplit(labels=labels, preprocessing=preprocessing_of(folder, recipe.data))
    return Run(recipe=recipe, folder=read_state(folder), data=DataSet(train=split, val=split))


def preprocessing_of(folder: Path, spec: DataSpec) -> Preprocessing:
    """Return the preprocessing in a run's files, else of the recipe."""
    path = folder / Variant.FLOAT.onnx_file
    text = read_onnx(path).metadata.get(PREPROCESSING_KEY) if path.is_file() else None
    return Preprocessing.of(spec, mean=_GREY, std=_GREY) if text is None else Preprocessing.from_json(text)


class BlankSplit(Split):
    """Two black images of the input's shape, to trace a network with."""

    def __init__(self, *, labels: tuple[str, ...], preprocessing: Preprocessing) -> None:
        super().__init__(labels=labels, preprocessing=preprocessing, seed=0)

    def __len__(self) -> int:
        return 2

    def load(self, indices: list[int], *, epoch: int | None, device: torch.device) -> Batch:
        """Return zeros (n, channels, height, width) and targets of class 0."""
        count = len(indices)
        images = torch.zeros(count, *self.preprocessing.input_shape, device=device)
        return images, torch.zeros(count, dtype=torch.int64, device=device)
