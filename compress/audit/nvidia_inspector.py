"""Parses the layers of an engine from the JSON of TensorRT's inspector, in the forms up to 10.x and from 11.0 on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.audit.layers import EngineLayer, EngineListing
from compress.audit.nvidia_layer import engine_layer, first_profile, omissions, split_bindings, without_constants
from compress.errors import AuditError
from compress.files import parse_json

_AGAIN = "build the engine with profiling verbosity DETAILED (trtexec --profilingVerbosity=detailed) and export again"


def parse_inspector(text: str) -> EngineListing:
    """Read the inspector's JSON of one engine, built with profiling verbosity DETAILED.

    Raises:
        AuditError: the text is not JSON, not the inspector's, or holds names of layers only.
    """
    try:
        document = parse_json(text)
    except ValueError as error:
        raise AuditError(
            f"the layer information cannot be read ({error}); give the file that --exportLayerInfo wrote"
        ) from None
    rows = document.get("Layers") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not rows:
        raise AuditError("the JSON has no list `Layers`; give the file of EngineInspector or trtexec --exportLayerInfo")
    if any(not isinstance(layer, dict) for layer in rows):
        raise AuditError(f"the JSON holds the names of {len(rows)} layers and no more; {_AGAIN}")
    if not any("Inputs" in layer or "Outputs" in layer for layer in rows):
        raise AuditError(f"none of the {len(rows)} layers in the JSON has inputs or outputs; {_AGAIN}")
    chosen, others = first_profile(rows)
    notes = omissions(chosen)
    if others:
        notes += (f"the engine has several optimization profiles: {others} layers of the later ones are left out",)
    layers = [engine_layer(layer) for layer in chosen]
    inputs, outputs = _io_names(document, layers)
    new_form = "I/O Tensors" in document or any("Datatype" in t or "DataType" in t for t in _all_tensors(chosen))
    return EngineListing(
        source=f"inspector JSON ({'11.x' if new_form else '10.x'} form)",
        layers=without_constants(layers, {*inputs, *outputs}),
        inputs=inputs,
        outputs=outputs,
        notes=notes,
    )


def _all_tensors(layers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    found = [t for layer in layers for key in ("Inputs", "Outputs") for t in layer.get(key) or ()]
    return [tensor for tensor in found if isinstance(tensor, dict)]


def _io_names(document: Mapping[str, Any], layers: Sequence[EngineLayer]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the network's inputs and outputs, from `I/O Tensors` or `Bindings`."""
    named = [t for t in document.get("I/O Tensors") or () if isinstance(t, dict) and "Name" in t]
    if named:
        by_mode = {
            mode: tuple(str(t["Name"]) for t in named if str(t.get("IOMode")).lower() == mode)
            for mode in ("input", "output")
        }
        return by_mode["input"], by_mode["output"]
    return split_bindings([str(name) for name in document.get("Bindings") or ()], layers)
