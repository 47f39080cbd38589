"""The layers of an engine from TensorRT's inspector: JSON that `trtexec --exportLayerInfo` and EngineInspector write.

Two forms are read. Up to 10.x a tensor's layout and type are one sentence, `Format/Datatype`, and the network's own
tensors are names under `Bindings`. From 11.0 on `Format` and `Datatype` stand apart and `I/O Tensors` holds objects
(TensorRT documentation, "Migrating IEngineInspector Usage from TensorRT 10.x to 11.x"). Both need an engine built with
profiling verbosity DETAILED; for one with dynamic shapes, 10.x tells types only through an execution context whose
shapes are set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compress.engines.engine_layers import EngineLayer, EngineListing, EngineTensor, type_name
from compress.engines.nvidia_log import onnx_nodes
from compress.errors import AuditError

_AGAIN = "build the engine with profiling verbosity DETAILED (trtexec --profilingVerbosity=detailed) and export again"


def parse_inspector(text: str) -> EngineListing:
    """Read the inspector's JSON, of one engine.

    Raises:
        AuditError: not JSON, not the inspector's, or with names of layers only.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise AuditError(f"the layer information is not JSON ({error}); give what --exportLayerInfo wrote") from None
    layers = document.get("Layers") if isinstance(document, dict) else None
    if not isinstance(layers, list) or not layers:
        raise AuditError("the JSON has no list `Layers`; give what EngineInspector or trtexec --exportLayerInfo wrote")
    if any(isinstance(layer, str) for layer in layers):
        raise AuditError(f"the JSON holds the names of {len(layers)} layers and no more; {_AGAIN}")
    if any(not isinstance(layer, dict) or "Name" not in layer for layer in layers):
        raise AuditError(f"the JSON has a layer without a `Name`; {_AGAIN}")
    new_form = "I/O Tensors" in document or any("Format/Datatype" not in t for t in _all_tensors(layers))
    inputs, outputs = _io_names(document)
    return EngineListing(
        source=f"inspector JSON ({'11.x' if new_form else '10.x'} form)",
        layers=tuple(_layer(layer) for layer in layers),
        inputs=inputs,
        outputs=outputs,
    )


def _all_tensors(layers: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    return [t for layer in layers for key in ("Inputs", "Outputs") for t in layer.get(key, ()) if isinstance(t, dict)]


def _io_names(document: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The network's inputs and outputs. `Bindings` does not say which is which: what a layer writes is an output."""
    named = [t for t in document.get("I/O Tensors", ()) if isinstance(t, dict)]
    if named:
        by_mode = {
            mode: tuple(str(t["Name"]) for t in named if t.get("IOMode") == mode) for mode in ("Input", "Output")
        }
        return by_mode["Input"], by_mode["Output"]
    bindings = [str(name) for name in document.get("Bindings", ())]
    written = {t.get("Name") for layer in document["Layers"] for t in layer.get("Outputs", ()) if isinstance(t, dict)}
    return tuple(b for b in bindings if b not in written), tuple(b for b in bindings if b in written)


def _layer(layer: Mapping[str, Any]) -> EngineLayer:
    weights = layer.get("Weights")
    told = weights if isinstance(weights, Mapping) else {}
    sparse = layer.get("HasSparseWeights", layer.get("AllowSparse"))
    kind = str(layer.get("LayerType", ""))
    return EngineLayer(
        name=str(layer["Name"]),
        kind=kind or str(layer.get("ParameterType", "")),
        onnx_nodes=onnx_nodes(str(layer.get("Metadata", ""))),
        inputs=_tensors(layer.get("Inputs")),
        outputs=_tensors(layer.get("Outputs")),
        constants=_tensors(layer.get("Constants")),
        tactic=str(layer.get("TacticName") or ""),
        weight_elements=_count(told.get("Count")),
        weight_type=type_name(str(told["Type"])) if "Type" in told else "",
        out_channels=_count(layer.get("OutMaps")),
        sparse_weights=None if sparse is None else bool(sparse),
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _tensors(items: Any) -> tuple[EngineTensor, ...]:
    return tuple(_tensor(item) for item in items or () if isinstance(item, Mapping))


def _tensor(item: Mapping[str, Any]) -> EngineTensor:
    together = item.get("Format/Datatype")
    dtype = together if together is not None else item.get("Datatype", item.get("DataType", ""))
    layout = together if together is not None else item.get("Format", "")
    return EngineTensor(
        name=str(item.get("Name", "")),
        dtype=type_name(str(dtype)),
        shape=tuple(int(size) for size in item.get("Dimensions", ())),
        format=str(layout),
        strides=tuple(int(size) for size in item.get("Strides", ())),
    )
