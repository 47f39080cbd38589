"""A layer as TensorRT tells of it, in JSON or in a log's text, as an `EngineLayer`.

Keys differ between versions, kinds of layers and verbosity. A key that is missing is not guessed: a name or kind
becomes "?", a type or shape unknown, and `omissions` says how often; keys that nothing here reads are kept in
`EngineLayer.more`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from compress.engines.engine_layers import EngineLayer, EngineTensor, type_name

UNKNOWN = "?"
_STUB = "__myelin_CASK_STUB"
_READ = frozenset(
    "Name LayerType ParameterType Inputs Outputs Constants TacticName Metadata Weights OutMaps HasSparseWeights "  # noqa: SIM905
    "AllowSparse StreamId".split()
)
_CONTROL = "l2_cache_"
"""Start of the names of channels that steer a cache, which some layers list among their inputs."""


def engine_layer(told: Mapping[str, Any]) -> EngineLayer:
    """A layer from its keys and values."""
    weights = told.get("Weights")
    weights = weights if isinstance(weights, Mapping) else {}
    sparse = told.get("HasSparseWeights", told.get("AllowSparse"))
    tactic = str(told.get("TacticName") or "").strip()
    return EngineLayer(
        name=str(told.get("Name", UNKNOWN)),
        kind=str(told.get("LayerType") or told.get("ParameterType") or UNKNOWN),
        onnx_nodes=onnx_nodes(str(told.get("Metadata") or "")),
        inputs=_tensors(told.get("Inputs")),
        outputs=_tensors(told.get("Outputs")),
        constants=_tensors(told.get("Constants")),
        tactic="" if tactic == _STUB else tactic,
        weight_elements=_count(weights.get("Count")),
        weight_type=type_name(str(weights["Type"])) if "Type" in weights else "",
        out_channels=_count(told.get("OutMaps")),
        sparse_weights=None if sparse is None else bool(sparse),
        more={key: value for key, value in told.items() if key not in _READ},
    )


def onnx_nodes(metadata: str) -> tuple[str, ...]:
    r"""The ONNX nodes that a layer's metadata names, each once.

    >>> onnx_nodes("[ONNX Layer: /conv1/Conv]\x1e[ONNX Layer: a [b]]__gemm_from_conv1x1")
    ('/conv1/Conv', 'a [b]')
    """
    parts = metadata.split("[ONNX Layer: ")[1:]
    return tuple(dict.fromkeys(part.rpartition("]")[0] for part in parts))


def omissions(layers: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What layers do not tell, in words, for each key that an audit needs."""
    told = []
    for key in ("Name", "LayerType", "Inputs", "Outputs"):
        count = sum(key not in layer and not (key == "LayerType" and "ParameterType" in layer) for layer in layers)
        if count:
            told.append(f"{count} of {len(layers)} layers are told without their {key}")
    return tuple(told)


def first_profile(layers: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], int]:
    """The layers of the first optimization profile, and how many of the others there are.

    An engine of several profiles lists its layers once for each; those of the second and later end in `[profile N]`.
    """
    own = [layer for layer in layers if not re.search(r"\[profile \d+\]", str(layer.get("Name", "")))]
    return own, len(layers) - len(own)


def without_constants(layers: Sequence[EngineLayer], borders: Collection[str]) -> tuple[EngineLayer, ...]:
    """Layers whose weights and biases stand among their constants.

    TensorRT 10 lists them among the inputs of its products. They are those that no layer writes and that are none of
    the network's own inputs.

    Args:
        layers: all of an engine.
        borders: names of the network's inputs and outputs; without any, nothing can be told apart.
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
    """Dimensions; None where they are not told as whole numbers."""
    if not isinstance(value, list) or not all(isinstance(size, int) for size in value):
        return None
    return tuple(value)
