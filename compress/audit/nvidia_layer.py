"""Turns TensorRT's description of a layer, from JSON or from a log, into an `EngineLayer`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from compress.audit.layers import EngineLayer, EngineTensor, type_name

UNKNOWN = "?"
_STUB = "__myelin_CASK_STUB"
_READ = frozenset(
    "Name LayerType ParameterType Inputs Outputs Constants TacticName Metadata Weights OutMaps HasSparseWeights "  # noqa: SIM905
    "AllowSparse StreamId".split()
)
_CONTROL = "l2_cache_"
"""Start of the names of cache controls, which some layers list among their inputs."""


def engine_layer(row: Mapping[str, Any]) -> EngineLayer:
    """Make a layer from its keys and values."""
    weights = row.get("Weights")
    weights = weights if isinstance(weights, Mapping) else {}
    sparse = row.get("HasSparseWeights", row.get("AllowSparse"))
    tactic = str(row.get("TacticName") or "").strip()
    return EngineLayer(
        name=str(row.get("Name", UNKNOWN)),
        kind=str(row.get("LayerType") or row.get("ParameterType") or UNKNOWN),
        onnx_nodes=onnx_nodes(str(row.get("Metadata") or "")),
        inputs=_tensors(row.get("Inputs")),
        outputs=_tensors(row.get("Outputs")),
        constants=_tensors(row.get("Constants")),
        tactic="" if tactic == _STUB else tactic,
        weight_elements=_count(weights.get("Count")),
        weight_type=type_name(str(weights["Type"])) if "Type" in weights else "",
        out_channels=_count(row.get("OutMaps")),
        sparse_weights=None if sparse is None else bool(sparse),
        more={key: value for key, value in row.items() if key not in _READ},
    )


def onnx_nodes(metadata: str) -> tuple[str, ...]:
    r"""Return the ONNX nodes that a layer's metadata name, each once.

    >>> onnx_nodes("[ONNX Layer: /conv1/Conv]\x1e[ONNX Layer: a [b]]__gemm_from_conv1x1")
    ('/conv1/Conv', 'a [b]')
    """
    parts = metadata.split("[ONNX Layer: ")[1:]
    return tuple(dict.fromkeys(part.rpartition("]")[0] for part in parts))


def omissions(layers: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Count the layers that lack a key, for each key that an audit needs, as sentences."""
    notes = []
    for key in ("Name", "LayerType", "Inputs", "Outputs"):
        count = sum(key not in layer and not (key == "LayerType" and "ParameterType" in layer) for layer in layers)
        if count:
            notes.append(f"{count} of {len(layers)} layers are listed without their {key}")
    return tuple(notes)


def first_profile(layers: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], int]:
    """Return the layers of the first profile, and the number of others, whose names end in `[profile N]`."""
    own = [layer for layer in layers if not re.search(r"\[profile \d+\]", str(layer.get("Name", "")))]
    return own, len(layers) - len(own)


def without_constants(layers: Sequence[EngineLayer], borders: Collection[str]) -> tuple[EngineLayer, ...]:
    """Move weights and biases that are listed among a layer's inputs, as by TensorRT 10, to its constants.

    Without `borders`, the network's inputs and outputs, the layers are returned unchanged.
    """
    if not borders:
        return tuple(layers)
    known = {*borders, *(tensor.name for layer in layers for tensor in layer.outputs)}
    return tuple(
        replace(
            layer,
            inputs=tuple(tensor for tensor in layer.inputs if tensor.name in known),
            constants=(*layer.constants, *(tensor for tensor in layer.inputs if tensor.name not in known)),
        )
        for layer in layers
    )


def split_bindings(names: Sequence[str], layers: Sequence[EngineLayer]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (inputs, outputs) of the network: the bindings that a layer writes are outputs."""
    written = {tensor.name for layer in layers for tensor in layer.outputs}
    return tuple(n for n in names if n not in written), tuple(n for n in names if n in written)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _tensors(items: Any) -> tuple[EngineTensor, ...]:
    found = [_tensor(item) for item in items or () if isinstance(item, Mapping)]
    return tuple(tensor for tensor in found if not tensor.name.startswith(_CONTROL))


def _tensor(item: Mapping[str, Any]) -> EngineTensor:
    together = item.get("Format/Datatype", item.get("Format/DataType"))
    dtype = together if together is not None else item.get("Datatype", item.get("DataType", ""))
    layout = together if together is not None else item.get("Format", "")
    shape = _sizes(item.get("Dimensions"))
    return EngineTensor(
        name=str(item.get("Name", UNKNOWN)),
        dtype=type_name(str(dtype)),
        shape=shape or (),
        format=str(layout),
        strides=_sizes(item.get("Strides")) or (),
        rows=None if shape is None else 1,
    )


def _sizes(value: Any) -> tuple[int, ...] | None:
    """Return dimensions; None if they are not a list of whole numbers."""
    if not isinstance(value, list) or not all(isinstance(size, int) for size in value):
        return None
    return tuple(value)
