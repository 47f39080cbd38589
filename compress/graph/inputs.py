"""Inputs and outputs of models by position or keyword, their names, and whether a graph takes images of other sizes.

Batches of a user's loader become such inputs.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from compress.errors import CalibrationError, DataError, ModelError
from compress.graph.report import report_of
from compress.support.imports import any_failure

# A tensor, tensors in the order of `forward`, or tensors by the names of its arguments.
Inputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]

# Keys of a mapping that hold targets, which are no inputs.
TARGET_KEYS = ("labels", "label", "targets", "target")


def as_array(value: Any) -> NDArray[Any]:
    """A value of a batch as a NumPy array; bfloat16 becomes float32."""
    if not isinstance(value, Tensor):
        array = np.asarray(value)
        return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


class KeywordInputs(tuple[Tensor, ...]):
    """Inputs that a model takes by keyword (`names`); a graph traced with them takes them in this order."""

    names: tuple[str, ...]

    def __new__(cls, named: Mapping[str, Tensor]) -> KeywordInputs:
        made = super().__new__(cls, named.values())
        made.names = tuple(named)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return KeywordInputs, (dict(zip(self.names, self, strict=True)),)


@contextmanager
def hooked(modules: Mapping[str, nn.Module], hook: Callable[[str, nn.Module, Any, Any], Any]) -> Iterator[None]:
    """Call `hook` with a module's path, itself, its inputs and its output; what it returns replaces the output."""
    with ExitStack() as stack:
        for path, module in modules.items():
            stack.enter_context(module.register_forward_hook(partial(hook, path)))
        yield


def as_inputs(example_inputs: Inputs) -> tuple[Tensor, ...]:
    """A tensor, a sequence or a mapping of tensors as a tuple, which keeps the names of a mapping.

    The targets of a mapping are left out.
    """
    if isinstance(example_inputs, KeywordInputs):
        return example_inputs
    if isinstance(example_inputs, Mapping):
        named = {name: value for name, value in example_inputs.items() if name not in TARGET_KEYS}
        given: tuple[Any, ...] = KeywordInputs(named)
    else:
        given = tuple(example_inputs) if isinstance(example_inputs, Sequence) else (example_inputs,)
    if not given or not all(isinstance(x, Tensor) for x in given):
        got = ", ".join(type(x).__name__ for x in given) or "nothing"
        without = "; leave None out, by giving a mapping of names" if any(x is None for x in given) else ""
        raise ModelError(
            f"example_inputs must be a tensor, or a sequence or mapping of tensors, got {got}; wrap a model that takes "
            f"anything else (a list of images) in a module whose forward takes tensors{without}"
        )
    if any(x.is_inference() for x in given):  # of torch.inference_mode(): they cannot be saved for a gradient
        copies = [x.clone() for x in given]
        named = dict(zip(given.names, copies, strict=True)) if isinstance(given, KeywordInputs) else {}
        return KeywordInputs(named) if named else tuple(copies)
    return given


def run_with(model: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
    """Call a model, or its `forward`: by keyword where the inputs have names (not graph modules), else by position."""
    owner = getattr(model, "__self__", model)
    if isinstance(inputs, KeywordInputs) and not isinstance(owner, fx.GraphModule):
        return model(**dict(zip(inputs.names, inputs, strict=True)))
    return model(*inputs)


def run_batch(model: Callable[..., Any], inputs: tuple[Tensor, ...], *, remark: str = "") -> None:
    """Run a model on a calibration batch (CalibrationError: it fails on it)."""

    def refusal(error: Exception) -> CalibrationError:
        shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in inputs)
        reason = str(error).strip().partition("\n")[0]
        return CalibrationError(
            f"the model fails on a calibration batch of {shapes} ({reason}); give batches of the type and the channels "
            f"of example_inputs{remark}"
        )

    with any_failure(refusal):
        run_with(model, inputs)


def each_input(function: Callable[[Tensor], Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if isinstance(inputs, KeywordInputs):
        return KeywordInputs({name: function(x) for name, x in zip(inputs.names, inputs, strict=True)})
    return tuple(function(x) for x in inputs)


def first_of(inputs: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    return each_input(lambda x: x[:count], inputs)


def copies_of(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return each_input(Tensor.clone, inputs)


def shapes_text(inputs: tuple[Tensor, ...]) -> str:
    names = [f"{name} " for name in inputs.names] if isinstance(inputs, KeywordInputs) else [""] * len(inputs)
    return ", ".join(f"{name}{tuple(x.shape)} {x.dtype}" for name, x in zip(names, inputs, strict=True))


def flat_tensors(value: Any) -> list[Tensor]:
    """The tensors in a tensor, tuple, list, mapping or dataclass, in order."""
    return [tensor for _, tensor in named_tensors(value)]


def named_tensors(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """`flat_tensors`, each with the keys, fields and indices that lead to it, joined by "_" ("" for a lone tensor)."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (tuple, list)):
        items = zip(getattr(value, "_fields", None) or range(len(value)), value, strict=True)
    elif dataclasses.is_dataclass(value):
        items = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    return [found for key, item in items for found in named_tensors(item, f"{name}_{key}" if name else str(key))]


def bound_to_size(graph_module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> str:
    """A sentence on the size of images, (N, C, H, W), that the graph is bound to; "" if none, or not known."""
    if any(x.dim() != 4 for x in inputs):
        return ""
    height, width = inputs[0].shape[2:]
    larger = each_input(
        lambda x: x.new_empty((*x.shape[:2], *(2 * side for side in x.shape[2:])), device="meta"), inputs
    )
    place = _failing_node(graph_module, larger)
    same = each_input(lambda x: torch.empty_like(x, device="meta"), inputs)
    if place is None or _failing_node(graph_module, same) is not None:
        return ""
    return (
        f"the network takes images of {height} x {width} pixels alone: {place} has a size or a tensor that was fixed "
        "when it was traced; trace and quantize it again for another size"
    )


def size_remark(model: nn.Module) -> str:
    """What to add to the error of a model that failed on its inputs: that it is bound to a size, or ""."""
    bound = report_of(model).bound
    return f"; {bound}" if bound else ""


def _failing_node(graph_module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> str | None:
    run = _OnMeta(graph_module)
    try:
        with torch.no_grad():
            run.run(*inputs)
    except Exception:  # a graph's operations can fail in any way
        return run.place
    return None


class _OnMeta(fx.Interpreter):
    """Runs a graph on the meta device, beside its weights; `place` is the node that ran last."""

    place = ""

    def run_node(self, n: fx.Node) -> object:
        fixed = [str(node.target) for node in n.all_input_nodes if node.op == "get_attr"]
        name = str(n.target) if n.op == "call_module" else n.name
        self.place = f"{name} (of {', '.join(fixed)})" if fixed else name
        return super().run_node(n)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        module = self.submodules[target]
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        there = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        return torch.func.functional_call(module, there, args, kwargs)

    def fetch_attr(self, target: str) -> object:
        value = super().fetch_attr(target)
        return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


# Tensors, or tuples that begin with all inputs of the model, which a target may follow; see `batch_inputs`.
Batches = Iterable[Any]


def split_batch(batch: Any) -> tuple[Any, Any]:
    """The inputs of a labelled batch (a tensor, a tuple, or a mapping by keyword) and its targets.

    A batch is (images, targets); (first, second, ..., targets); or a mapping with targets under one of `TARGET_KEYS`.

    >>> inputs, targets = split_batch({"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.zeros(2)})
    >>> list(inputs), tuple(targets.shape)
    (['pixel_values'], (2,))
    """
    if isinstance(batch, Mapping):
        key = next((key for key in TARGET_KEYS if key in batch), None)
        if key is None:
            raise DataError(
                f"a batch has the keys {', '.join(map(str, batch))}; its targets must be its {TARGET_KEYS[0]!r}"
            )
        return {name: value for name, value in batch.items() if name not in TARGET_KEYS}, batch[key]
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise DataError(f"a batch is a {type(batch).__name__}; give pairs of images and targets, or mappings")
    inputs = tuple(batch[:-1])
    return (inputs[0] if len(inputs) == 1 else inputs), batch[-1]


def batch_inputs(batch: Any, count: int = 1) -> tuple[Tensor, ...]:
    """The first `count` tensors of a batch: a tensor, a tuple or list, or one whose first element holds them.

    >>> images, target = torch.zeros(2, 3, 8, 8), torch.zeros(2)
    >>> [tuple(x.shape) for x in batch_inputs((images, target))]
    [(2, 3, 8, 8)]
    >>> [tuple(x.shape) for x in batch_inputs(((images, images), target), count=2)]
    [(2, 3, 8, 8), (2, 3, 8, 8)]
    """
    parts = batch if isinstance(batch, (tuple, list)) else [batch]
    if parts and isinstance(parts[0], (tuple, list)):
        parts = parts[0]
    inputs = tuple(parts[:count])
    if len(inputs) < count or not all(isinstance(x, Tensor) for x in inputs):
        raise DataError(_too_few(parts, count))
    return inputs


def _too_few(parts: Sequence[Any], count: int) -> str:
    got = ", ".join(type(part).__name__ for part in parts) or "nothing"
    wanted = "a tensor or (tensor, target)" if count == 1 else f"a tuple that begins with {count} tensors"
    return f"a batch holds {got}; the model takes {count} input{'s'[: count > 1]}: give {wanted}"


def model_inputs(model: nn.Module, batch: Any, graph: nn.Module | None = None) -> tuple[Tensor, ...]:
    """The inputs of `model` in a batch, on its device: as many as `forward` has arguments without a default.

    A mapping gives the tensors whose keys are arguments of `forward`. `graph` is what was traced of a model, and knows
    how many inputs a `forward(*inputs)` takes.
    """
    device = device_of(model)
    if isinstance(batch, Mapping):
        return each_input(lambda x: x.to(device), _named_inputs(model, batch))
    return tuple(x.to(device) for x in batch_inputs(batch, _required(model if graph is None else graph)))


def first_inputs(
    model: nn.Module, batches: Iterable[Any], images: int, graph: nn.Module | None = None
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the inputs of the first `images` images, batch by batch; `graph` as for `model_inputs`."""
    for batch in batches:
        inputs = first_of(model_inputs(model, batch, graph), images)
        images -= len(inputs[0])
        if len(inputs[0]):
            yield inputs
        if images <= 0:
            return


def _named_inputs(model: nn.Module, batch: Mapping[str, Any]) -> KeywordInputs:
    given = {name: value for name, value in batch.items() if name not in TARGET_KEYS and isinstance(value, Tensor)}
    known = _arguments(model)
    arguments = [name for name in known if name in given]
    if not arguments and inspect.Parameter.VAR_KEYWORD in known.values():
        arguments = [*given]
    if len(given) < (count := _required(model)):
        raise DataError(_too_few(list(given.values()), count))
    if len(arguments) < len(given):
        names = ", ".join(map(str, batch))
        raise DataError(
            f"a batch has the keys {names}, and {type(model).__name__} takes {', '.join(known)}: name them alike"
        )
    return KeywordInputs({name: given[name] for name in arguments})


def _arguments(model: nn.Module) -> dict[str, Any]:
    """Arguments of `forward` with their kinds; a graph may have renamed them."""
    if isinstance(model, fx.GraphModule):
        return {str(node.target): None for node in model.graph.nodes if node.op == "placeholder"}
    return {name: parameter.kind for name, parameter in inspect.signature(model.forward).parameters.items()}


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter or buffer; the CPU for a model without any."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _required(model: nn.Module) -> int:
    """Number of arguments of `forward` without a default; 1 if it takes any number of them."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return max(1, sum(p.kind in positional and p.default is p.empty for p in parameters))
