"""A model by its name, and its weights."""

from __future__ import annotations

import inspect
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from compress.detection import (
    FAMILIES,
    TWO_STAGE,
    DetectorNetwork,
    ProposalNetwork,
    has_background,
    is_detector,
    is_two_stage,
)
from compress.errors import CheckpointError, ModelError, first_few, near_misses
from compress.files import expand_user
from compress.models import ModelSpec
from compress.support.imports import any_failure, described, imported, is_import_path
from compress.version import install_hint

# For each name whose shape differs: the shape in the file, and in the model.
Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

SUFFIXES = (".safetensors", ".pt", ".pth", ".th", ".ckpt", ".bin")

_MOST_PACKED = 16  # times that the tensors of a file may be larger than the file

_WRAPPERS = ("state_dict", "model_state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.", "model.")
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")  # used in training alone, by googlenet and inception_v3
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")  # names before torchvision 0.3


def read_state_dict(path: Path | str) -> dict[str, Tensor]:
    """Tensors of a file, on the CPU, unwrapped; no code of it runs."""
    path = expand_user(path)
    if not path.is_file():
        raise CheckpointError(f"there is no weights file {path}")
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f"{path} is not a weights file by its name; allowed endings: {', '.join(SUFFIXES)}")
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            if zipfile.is_zipfile(path):  # torch stores its tensors as they are
                with zipfile.ZipFile(path) as file:
                    held = sum(entry.file_size for entry in file.infolist())
                if held > _MOST_PACKED * path.stat().st_size:
                    raise ValueError(f"it unpacks to {held:,} bytes")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds Python objects besides tensors, or is damaged, and was not loaded, since such objects can "
            f"run code. Save model.state_dict() instead of the model ({_first_line(error)})"
        ) from error
    except Exception as error:  # a damaged file can make a reader of pickles fail in any way
        raise CheckpointError(f"{path} is truncated or not a weights file ({_first_line(error)})") from error
    return _tensors(content, path)


class Loaded(NamedTuple):
    """What was done to the tensors of a file.

    Attributes:
        other_classes: of a classifier left out, or None.
    """

    notes: tuple[str, ...]
    other_classes: int | None


def fit_state(model: nn.Module, state: Mapping[str, Tensor], *, source: str, num_classes: int | None = None) -> Loaded:
    """Load named tensors into `model`, all or none; a classifier for another number of classes is left out."""
    own = model.state_dict()
    fitted, notes = _renamed(state, own)
    missing = [name for name in own if name not in fitted and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in fitted if name not in own]
    shapes = {
        n: (tuple(t.shape), tuple(own[n].shape)) for n, t in fitted.items() if n in own and t.shape != own[n].shape
    }
    others = None if num_classes is None else _classes_of_foreign_head(shapes, num_classes)
    if missing or unexpected or (shapes and others is None):
        raise CheckpointError(_misfit(source, missing, unexpected, shapes))
    if others is not None:
        notes.append(
            f"{source} classifies {others} classes, not {num_classes}: its classifier ({', '.join(shapes)}) was left "
            f"out, and the model has a new one"
        )
        fitted = {name: tensor for name, tensor in fitted.items() if name not in shapes}
    # The model's own dictionary has the layers' versions, which some files lack
    own.update(fitted)
    model.load_state_dict(own)
    return Loaded(tuple(notes), others)


def _tensors(content: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not named tensors; save model.state_dict()")
    for wrapper in _WRAPPERS:
        if isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
            break
    foreign = [str(name) for name, value in content.items() if not _is_plain(value)]
    if foreign or not content:
        raise CheckpointError(
            f"{path} does not hold named tensors alone (others: {first_few(foreign)}); save model.state_dict(), or "
            f"that under one of the names {', '.join(_WRAPPERS)}"
        )
    return {str(name): value for name, value in content.items()}


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_quantized or value.is_meta)


def _renamed(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return `state` under the model's names, without known prefixes, and a note for each change."""
    named, notes = dict(state), []
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in named) and not any(name.startswith(prefix) for name in own):
            named = {name.removeprefix(prefix): tensor for name, tensor in named.items()}
            notes.append(f"the prefix {prefix!r} was taken off all names")
    for prefix in _AUXILIARY:
        if any(name.startswith(prefix) for name in named) and not any(name.startswith(prefix) for name in own):
            named = {name: tensor for name, tensor in named.items() if not name.startswith(prefix)}
            notes.append(f"the auxiliary classifier {prefix.removesuffix('.')!r} was left out")
    return {_OLD_DENSENET.sub(r"\1\2", name): tensor for name, tensor in named.items()}, notes


def _classes_of_foreign_head(shapes: Shapes, num_classes: int) -> int | None:
    """The file's number of classes if nothing else differs, else None."""
    counts = set()
    for there, here in shapes.values():
        if not there or not here or there[1:] != here[1:] or here[0] % num_classes:
            return None
        anchors = here[0] // num_classes  # of a detector: it has outputs for each class and anchor
        if there[0] % anchors:
            return None
        counts.add(there[0] // anchors)
    return counts.pop() if len(counts) == 1 else None


def _misfit(source: str, missing: list[str], unexpected: list[str], shapes: Shapes) -> str:
    reshaped = [f"{name} {there} in the file, {here} in the model" for name, (there, here) in shapes.items()]
    parts = (
        f"{len(missing)} missing in the file ({first_few(missing)})" if missing else "",
        f"{len(unexpected)} unexpected ({first_few(unexpected)})" if unexpected else "",
        f"{len(reshaped)} of another shape ({first_few(reshaped)})" if reshaped else "",
    )
    hint = mask_hint(missing, unexpected)
    return f"{source} belongs to another model; nothing was loaded{hint}: {'; '.join(part for part in parts if part)}"


def mask_hint(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """Advice where file and model differ by masks, or "".

    >>> mask_hint(["fc.parametrizations.weight.0.mask"], ["fc.weight"])
    ' (the file is of a dense network and the model is masked: load it before sparsify)'
    """
    mask = ".parametrizations.weight.0.mask"
    if any(name.endswith(mask) for name in unexpected):
        return " (the file is of a masked network: call sparsify before loading it, or save it after squash_masks)"
    if any(name.endswith(mask) for name in missing):
        return " (the file is of a dense network and the model is masked: load it before sparsify)"
    return ""


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


if TYPE_CHECKING:
    from torchvision.models import WeightsEnum


_RESERVED = {"num_classes": "num_classes", "weights": "weights", "pretrained": "weights", "checkpoint_path": "weights"}


class BuiltModel(NamedTuple):
    """A model, and a sentence for each change to be told.

    Attributes:
        weights_classes: of the weights where another number: the classifier is then random.
    """

    model: nn.Module
    notes: tuple[str, ...]
    weights_classes: int | None = None


def build_model(spec: ModelSpec, *, num_classes: int, task: str = "classification") -> nn.Module:
    """Make the model that `spec` names, on the CPU, in float32 and training mode.

    Args:
        spec: name, weights and options.
        num_classes: number of classes of the data.
        task: its networks of torchvision are those that a plain name means.

    Returns:
        The model; `build_model_with_notes` also returns notes, such as that of a new classifier.

    Raises:
        ModelError: the model or the named weights do not exist or cannot be downloaded, or the options do not fit.
        CheckpointError: the weights file is missing, damaged or of another model.

    Examples:
        >>> network = compress.build_model(compress.ModelSpec(name="squeezenet1_1"), num_classes=4)
        >>> network(torch.randn(2, 3, 64, 64)).shape
        torch.Size([2, 4])
    """
    return build_model_with_notes(spec, num_classes=num_classes, task=task).model


def build_model_with_notes(spec: ModelSpec, *, num_classes: int, task: str = "classification") -> BuiltModel:
    """Make the model that `spec` names; arguments and errors are those of `build_model`."""
    built = build_whole(spec, num_classes=num_classes, task=task)
    if task == "detection" and is_detector(built.model):
        return built._replace(model=DetectorNetwork(built.model))
    if task == "detection" and is_two_stage(built.model):
        _check_box_head(spec, built.notes)
        return built._replace(model=ProposalNetwork(built.model))
    return built


def _check_box_head(spec: ModelSpec, notes: tuple[str, ...]) -> None:
    fresh = spec.weights is None and not is_import_path(spec.name)
    if fresh or notes:
        why = notes[0] if notes else "model.weights is null"
        raise ModelError(
            f"the box head of {spec.name} stays outside of the network, in float, and is not trained here ({why}): set "
            "model.weights to those of the whole detector, trained for the classes of the data"
        )


def build_whole(spec: ModelSpec, *, num_classes: int, task: str = "classification") -> BuiltModel:
    """Make the model that `spec` names, a detector with its anchors and losses; otherwise as `build_model`."""
    if spec.num_classes is not None and spec.num_classes < num_classes:
        raise ModelError(
            f"model.num_classes is {spec.num_classes}, but the data has {num_classes} classes; null, or no fewer"
        )
    for key, instead in _RESERVED.items():
        if key in spec.options:
            raise ModelError(f"model.options.{key} is not an option; set model.{instead} instead")
    classes = num_classes if spec.num_classes is None else spec.num_classes
    spec = _with_path(spec)
    source, colon, name = spec.name.partition(":")
    if source == "timm" and colon:
        return _timm(spec, name, classes)
    if (source == "torchvision" or not colon) and not spec.name.endswith(".onnx"):
        return _torchvision(spec, (name or source).lower(), classes, task)
    if spec.name.endswith(".onnx"):
        return _onnx(spec, classes)
    if spec.weights is not None and not _is_file(spec.weights):
        raise ModelError(
            f"model.weights is {spec.weights!r}: for {spec.name} it must be a file ({', '.join(SUFFIXES)})"
        )
    try:
        made = _made(spec, _factory(spec.name), classes)
    except OSError as error:
        raise ModelError(
            f"{spec.name} reads or fetches a file, and that failed ({error}); an option of it may leave the file out: "
            "model.options {weights_backbone: null} for torchvision, {encoder_weights: null} for "
            "segmentation_models_pytorch"
        ) from error
    return _with_file(made, spec, classes)


# --- torchvision -----------------------------------------------------------------------------------------------

_WITH_AUXILIARY = ("googlenet", "inception_v3")


def _torchvision(spec: ModelSpec, name: str, num_classes: int, task: str) -> BuiltModel:
    import torchvision  # lazy: it takes seconds, and models from elsewhere do not need it

    kinds = {
        "classification": ("classifier", torchvision.models),
        "segmentation": ("segmentation network", torchvision.models.segmentation),
        "detection": ("detector of boxes", torchvision.models.detection),
    }
    kind, module = kinds.get(task, kinds["classification"])
    known = torchvision.models.list_models(module=module)
    if task == "detection":
        known = [one for one in known if one.startswith((*FAMILIES, *TWO_STAGE))]
        num_classes += has_background(name)
    if name not in known:
        others = [other for other, (_, home) in kinds.items() if name in torchvision.models.list_models(module=home)]
        hint = f": it is one for task: {others[0]}" if others and others[0] != task else near_misses(name, known)
        raise ModelError(
            f"torchvision has no {kind} {name!r}{hint} (timm:NAME and package.module:factory name models from "
            "elsewhere)"
        )
    members = torchvision.models.get_model_weights(name)
    member = _torchvision_weights(spec, members) if spec.weights and not _is_file(spec.weights) else None
    # Without this, torchvision's segmentation networks and detectors download a backbone.
    defaults: dict[str, Any] = {} if module is torchvision.models else {"weights_backbone": None}
    if name in _WITH_AUXILIARY:
        # Auxiliary classifiers make training return tuples; torchvision's own weights expect another input range.
        defaults = {"aux_logits": False, "init_weights": True, "transform_input": member is not None}
    model = _made(spec, torchvision.models.get_model_builder(name), num_classes, **defaults)
    if member is None:
        return _with_file(model, spec, num_classes)
    loaded = fit_state(model, read_state_dict(_fetched(member)), source=str(member), num_classes=num_classes)
    return BuiltModel(model, loaded.notes, loaded.other_classes)


def _torchvision_weights(spec: ModelSpec, members: type[WeightsEnum]) -> WeightsEnum:
    enum, _, wanted = str(spec.weights).rpartition(".")
    if enum in ("", members.__name__) and wanted in members.__members__:
        return members[wanted]
    allowed = [*(member.name for member in members), "DEFAULT"]
    raise ModelError(
        f"model.weights is {spec.weights!r}{near_misses(wanted, allowed)} ({spec.name} has {', '.join(allowed)} of "
        f"{members.__name__}, or give a file: {', '.join(SUFFIXES)})"
    )


def _fetched(member: Any) -> Path:
    """The file in torch's cache; downloaded and its hash checked if missing."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(member.url).name
    if path.is_file():
        return path
    hash_prefix = re.search(r"-([0-9a-f]{8,})\.", path.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(member.url, str(path), hash_prefix and hash_prefix[1], progress=False)
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"the weights {member} are not on this machine, and fetching them from {member.url} failed ({error}). "
            f"Without network: fetch that file elsewhere and put it at {path}, or set model.weights to its path; "
            f"model.weights: null starts from fresh weights"
        ) from error
    return path


# --- timm ------------------------------------------------------------------------------------------------------


def _timm(spec: ModelSpec, name: str, num_classes: int) -> BuiltModel:
    try:
        import timm  # optional: an extra of the package
    except ImportError as error:
        raise ModelError(f"model.name {spec.name} needs timm ({error}): {install_hint('timm')}") from error
    if not timm.is_model(name):
        known = timm.list_models()
        raise ModelError(f"timm {timm.__version__} has no model {name!r}{near_misses(name, known)}")
    if spec.weights is not None and spec.weights != "pretrained" and not _is_file(spec.weights):
        raise ModelError(
            f"model.weights is {spec.weights!r}: for timm it is `pretrained` or a file ({', '.join(SUFFIXES)})"
        )
    if spec.weights != "pretrained":
        return _with_file(_made(spec, timm.create_model, num_classes, model_name=name), spec, num_classes)
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        raise ModelError(
            f"timm has no pretrained weights of {name}; name one that has (timm.list_pretrained()), or a file"
        )
    try:
        model = _made(spec, timm.create_model, num_classes, model_name=name, pretrained=True)
    except OSError as error:
        raise ModelError(
            f"the pretrained weights of timm's {name} are not on this machine, and fetching them from "
            f"{config.hf_hub_id or config.url} failed ({error}). Without network: fetch the file elsewhere and set "
            f"model.weights to its path; model.weights: null starts from fresh weights"
        ) from error
    if config.num_classes == num_classes:
        return BuiltModel(model, ())
    note = f"timm's {name} classifies {config.num_classes} classes, not {num_classes}: the model has a new classifier"
    return BuiltModel(model, (note,), config.num_classes)


# --- ONNX files --------------------------------------------------------------------------------------------------

# Named and not imported: files are read by parts above this one.
_READER = "compress.onnx_ptq.to_torch:from_onnx"


def _onnx(spec: ModelSpec, num_classes: int) -> BuiltModel:
    if spec.weights is not None or spec.num_classes is not None:
        raise ModelError(f"model.name is the file {spec.name}, which has its own weights and classes; set both to null")
    return BuiltModel(_made(spec, partial(_factory(_READER), spec.name), num_classes), ())


# --- common ----------------------------------------------------------------------------------------------------


def _factory(path: str) -> Callable[..., Any]:
    return imported(path, key="model.name", error=ModelError, what="a function that makes a model")


_CLASSES_ARGUMENTS = ("num_classes", "classes", "num_labels")


def _classes_argument(maker: Callable[..., Any]) -> str | None:
    try:
        parameters = inspect.signature(maker).parameters
    except (TypeError, ValueError):  # a function without a signature, as of an extension
        return "num_classes"
    named = next((name for name in _CLASSES_ARGUMENTS if name in parameters), None)
    return named or ("num_classes" if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else None)


def _made(spec: ModelSpec, maker: Callable[..., Any], num_classes: int, **defaults: Any) -> nn.Module:
    name = _classes_argument(maker)
    classes = {} if name is None else {name: num_classes}
    try:
        model = maker(**{**classes, **defaults, **spec.options})
    except (TypeError, ValueError, RuntimeError, AssertionError, LookupError, AttributeError, SystemExit) as error:
        stated = "".join(f"{key}={value} and " for key, value in classes.items())
        raise ModelError(
            f"{spec.name} cannot be made with {stated}model.options {spec.options} ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec.name} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _with_file(model: nn.Module, spec: ModelSpec, num_classes: int) -> BuiltModel:
    if spec.weights is None:
        return BuiltModel(model, ())
    loaded = fit_state(model, read_state_dict(spec.weights), source=spec.weights, num_classes=num_classes)
    return BuiltModel(model, loaded.notes, loaded.other_classes)


def _with_path(spec: ModelSpec) -> ModelSpec:
    """Return the specification with the file in the place of a function that returns its path."""
    if spec.weights is None or not is_import_path(spec.weights):
        return spec
    what = "a function that returns the path of a weights file"
    function = imported(spec.weights, key="model.weights", error=ModelError, what=what)
    with any_failure(lambda error: ModelError(f"model.weights {spec.weights} fails ({described(error)})")):
        path = function()
    if not isinstance(path, str | Path) or not _is_file(str(path)):
        raise ModelError(
            f"model.weights {spec.weights} returned {path!r}, not the path of a file ({', '.join(SUFFIXES)})"
        )
    return replace(spec, weights=str(path))


def _is_file(weights: str) -> bool:
    return Path(weights).suffix in SUFFIXES or "/" in weights or "\\" in weights
