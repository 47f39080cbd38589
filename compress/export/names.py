"""Names of nodes, tensors and metadata entries in the ONNX files that compress writes.

Export builds these names; audit, measurement and reports find modules and quantizers by them. No other file builds or
parses such a name, and this one imports neither onnx nor torch.

    node      /layer1/0/conv1/Conv             module path and operator, then _1, _2, ... where that is not unique
    tensor    /layer1/0/conv1/Conv_output_0    node and index of its output
    input     input                            input_0, input_1, ... where there are several
    output    logits                           keys or fields of the model's result where there are several
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from compress.variants import Variant

# Metadata entries: preprocessing and labels as JSON, digest of the recipe, a `Variant`, and the target of a quantized
# file.
PREPROCESSING_KEY = "compress.preprocessing"
LABELS_KEY = "compress.labels"
RECIPE_KEY = "compress.recipe.tree"
VARIANT_KEY = "compress.variant"
TARGET_KEY = "compress.target"

# Metadata entry of a DequantizeLinear whose weight fits in 4 bits, while the file is written.
INT4_KEY = "compress.num_bits"

_LOGITS = ("logits", "out", "output_0")


def module_prefix(module: str) -> str:
    """Return the start of the names of all nodes of a module.

    >>> module_prefix("layer1.0.conv1"), module_prefix("")
    ('/layer1/0/conv1/', '/')
    """
    return f"/{module.replace('.', '/')}/" if module else "/"


def node_name(module: str, op_type: str, number: int = 0) -> str:
    """Return the name of a node; `number` nodes of the same module and operator come before it.

    >>> node_name("layer1.0.conv1", "Conv"), node_name("", "Add", 2)
    ('/layer1/0/conv1/Conv', '/Add_2')
    """
    return module_prefix(module) + op_type + (f"_{number}" if number else "")


def tensor_name(node: str, output: int = 0) -> str:
    return f"{node}_output_{output}"


def quantized_tensor(quantizer: str, call: int = 0) -> str:
    """Return the name of the tensor that an activation quantizer writes in its call number `call`."""
    return tensor_name(node_name(quantizer, "DequantizeLinear", call))


def added_tensor(name: str, part: str) -> str:
    return f"{name}_{part}"


def shifted_tensor(name: str) -> str:
    """Return the name of a dequantized tensor, or of its node, beside `name`, which alone takes off the zero point."""
    return added_tensor(name, "shifted")


def added_constant(node: str, part: str) -> str:
    return f"{node}/{part}"


def module_of(node: str) -> str:
    """Return the path of the module that a node comes from.

    >>> module_of("/layer1/0/conv1/Conv")
    'layer1.0.conv1'
    """
    return node.rpartition("/")[0].strip("/").replace("/", ".")


def find_module(name: str, modules: Iterable[str]) -> str | None:
    """Return the module whose path occurs first in a name that an engine made of ours; None if there is none.

    Engines put text before and after the names of nodes. Of two modules at the same place the longer path is returned.

    >>> find_module("Convert_/layer1/0/conv1/Conv_f16", ["layer1.0", "layer1.0.conv1"])
    'layer1.0.conv1'
    """
    found = [(f"{name}/".find(module_prefix(module)), -len(module), module) for module in modules]
    return min((row for row in found if row[0] >= 0), default=(0, 0, None))[2]


def is_node(name: str, node: str) -> bool:
    """Return True if an engine's `name` is that of a node, or of a part that the engine has split it into."""
    return name == node or name.startswith(f"{node}/")


def input_names(count: int) -> list[str]:
    return ["input"] if count == 1 else [f"input_{i}" for i in range(count)]


def output_names(keys: Sequence[str], *, taken: Sequence[str] = ()) -> list[str]:
    """Return the names of a file's outputs: `logits` if there is one, else the keys that lead to each tensor.

    They are numbered (`output_0`, ...) if the keys are not names, or are not unique with those `taken` by the inputs.
    """
    if len(keys) == 1:
        return ["logits"]
    names = [key if key[0].isalpha() else f"output_{key}" for key in keys]
    if len({*names, *taken}) < len(names) + len(taken):
        return [f"output_{i}" for i in range(len(keys))]
    return names


def logits_output(names: Sequence[str]) -> str | None:
    """Return the output that holds the logits: the only one, or the one that is named so; None if there is none."""
    return names[0] if len(names) == 1 else next((name for name in _LOGITS if name in names), None)


def is_sparse(metadata: Mapping[str, str]) -> bool:
    """Return True if a file's metadata name a variant with 2:4 weights."""
    variant = Variant.named(metadata.get(VARIANT_KEY, ""))
    return variant is not None and variant.is_sparse
