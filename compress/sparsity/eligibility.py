"""Decides before training which layers are masked, with the reason for the others."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from compress.errors import SparsityError, near_misses
from compress.graph.inputs import Inputs, as_inputs, hooked, run_with
from compress.graph.modules import modes_restored
from compress.graph.ops import WEIGHTED, module_kind, tensor_of
from compress.sparsity import Pattern, SparsitySpec, check_sparsity_spec

# Channels of a 2:4 tensor-core tile in FP16: inputs and outputs of a layer must be multiples of these.
TENSORRT_IN, TENSORRT_OUT = 16, 8

# Below this many input and output channels TensorRT rarely finds a 2:4 kernel faster than its dense one (its
# engineers in TensorRT issues 3849 and 4065); a 3x3 kernel counts as nine times the input channels.
NOTEWORTHY_CHANNELS = 256

# Functions that multiply with one of their first three arguments, or with `weight`.
_TAKES_WEIGHT = frozenset(
    {
        *(F.linear, F.conv1d, F.conv2d, F.conv3d, F.bilinear, torch.addmm, torch.baddbmm),
        *(torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__),
    }
)

_TRANSPOSED = "a transposed convolution: its input channels are axis 0, and no sparse kernel takes it"


@dataclass(frozen=True, kw_only=True)
class Eligibility:
    """The decision for a layer: its class, the shape of its weight, and why it is not masked or the speed to expect."""

    layer: str
    type: str
    shape: tuple[int, ...]
    eligible: bool
    reason: str


def eligibility(
    model: nn.Module, spec: SparsitySpec, *, example_inputs: Inputs | None = None
) -> tuple[Eligibility, ...]:
    """Decide for every convolution and linear layer, in order, if it is masked.

    Weights that are no layer's own follow, each with the reason why it stays dense. `example_inputs` show the order of
    layers, which of them run, and weights of functions; None = the order of registration.
    """
    pattern = check_sparsity_spec(spec)
    layers, others = weighted_layers(model), _other_weights(model)
    order = list(layers) if example_inputs is None else run_order(model, layers, example_inputs, others)
    check_rules(spec, [*layers, *others, *(path.rpartition(".")[0] for path in others)])
    ends = {order[0]: "first", order[-1]: "last"} if order else {}
    owners, holders = _attention_parts(model), _holders(model)
    rows = []
    for path, module in layers.items():
        enabled = _enabled(path, spec)
        indivisible = _indivisible(module, pattern)
        if indivisible and any(rule.enable and rule.match == path for rule in spec.rules):
            raise SparsityError(f"a rule enables {path}, but {indivisible}: disable it, or choose another pattern")
        reason = (
            (f"part of {owners[path]}, which computes with it in one piece" if path in owners else None)
            or _tied(path, module, holders)
            or (_TRANSPOSED if module_kind(module) == "conv_transpose" else indivisible)
            or ("a rule leaves it dense" if enabled is False else None)
            or (None if enabled else _unwise(module, pattern, spec, place=ends.get(path)))
            or (None if example_inputs is None or path in order else "it does not run on the example inputs")
        )
        rows.append(
            Eligibility(
                layer=path,
                type=type(module).__name__.removeprefix("Parametrized"),
                shape=tuple(weight_of(module).shape),
                eligible=reason is None,
                reason=reason or _note(module, pattern),
            )
        )
    return (*rows, *_dense_rows(model, spec, others))


def _other_weights(model: nn.Module) -> dict[str, str]:
    return {
        f"{path}.{name}".lstrip("."): type(module).__name__
        for path, module in model.named_modules()
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase, nn.Bilinear))
        for name, parameter in module._parameters.items()
        if parameter is not None and "weight" in name and parameter.dim() > 1
    }


def _dense_rows(model: nn.Module, spec: SparsitySpec, others: dict[str, str]) -> list[Eligibility]:
    rows, parameters = [], dict(model.named_parameters(remove_duplicate=False))
    for path, kind in others.items():
        reason = f"a parameter of {kind}, not the `weight` of a layer, which is what masks are made for"
        if any(rule.enable and rule.match == path for rule in spec.rules):
            raise SparsityError(f"a rule enables {path}, but it is {reason}: disable it, or compute with a layer there")
        shape = tuple(parameters[path].shape)
        rows.append(Eligibility(layer=path, type=kind, shape=shape, eligible=False, reason=reason))
    return rows


class _Weights(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.taken: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in _TAKES_WEIGHT:
            self.taken |= {id(value) for value in (*args[:3], kwargs.get("weight")) if isinstance(value, nn.Parameter)}
        return func(*args, **kwargs)


def chosen_layers(model: nn.Module, spec: SparsitySpec, rows: tuple[Eligibility, ...]) -> dict[str, nn.Module]:
    chosen = {row.layer: model.get_submodule(row.layer) for row in rows if row.eligible}
    if not chosen:
        why = "; ".join(f"{row.layer}: {row.reason}" for row in rows[:6]) or "it has no convolution or linear layer"
        raise SparsityError(f"no layer can be masked with pattern {spec.pattern!r} ({why}): add rules that enable some")
    return chosen


def weighted_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if module_kind(module) in WEIGHTED}


def check_rules(spec: SparsitySpec, layers: Iterable[str]) -> None:
    names = list(layers)
    for rule in spec.rules:
        if not fnmatch.filter(names, rule.match) and rule.match not in names:
            hint = near_misses(rule.match, names)
            raise SparsityError(
                f"sparsity rule {rule.match!r} matches no layer{hint} (layers: {', '.join(names[:8])}"
                f"{', ...' if len(names) > 8 else ''})"
            )


def large_enough(shape: tuple[int, ...]) -> bool:
    """True if a 2:4 kernel may be faster for this shape (out, in, ...)."""
    return min(shape[0], math.prod(shape[1:])) >= NOTEWORTHY_CHANNELS


def left_dense(path: str, spec: SparsitySpec) -> bool:
    return _enabled(path, spec) is False


def _enabled(path: str, spec: SparsitySpec) -> bool | None:
    verdicts = [rule.enable for rule in spec.rules if fnmatch.fnmatchcase(path, rule.match)]
    return verdicts[-1] if verdicts else None


def _attention_parts(model: nn.Module) -> dict[str, str]:
    return {
        f"{path}.{name}": path
        for path, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
        for name, _ in module.named_modules()
        if name
    }


def _holders(model: nn.Module) -> dict[int, list[str]]:
    paths: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                paths.setdefault(id(parameter), []).append(name.partition(".parametrizations.")[0])
    return paths


def _tied(path: str, module: nn.Module, holders: dict[int, list[str]]) -> str | None:
    """Reason to leave a layer dense whose weight another layer shares."""
    parametrized = parametrize.is_parametrized(module, "weight")
    chains: Any = getattr(module, "parametrizations", None)
    own = chains["weight"].parameters() if parametrized else [weight_of(module)]
    others = sorted({other for parameter in own for other in holders.get(id(parameter), ()) if other != path})
    return f"its weight is that of {', '.join(others)} too, which would use the zeros unmasked" if others else None


def _indivisible(module: nn.Module, pattern: Pattern) -> str | None:
    channels = weight_of(module).shape[1]
    if pattern.kind != "nm" or channels % pattern.m == 0:
        return None
    each = "" if getattr(module, "groups", 1) == 1 else " a group"
    return f"it has {channels} input channels{each}, not a multiple of {pattern.m}"


def _unwise(module: nn.Module, pattern: Pattern, spec: SparsitySpec, *, place: str | None) -> str | None:
    if place is not None:
        return f"the {place} layer is left dense unless a rule enables it"
    if getattr(module, "groups", 1) > 1:
        return f"a convolution of {module.groups} groups: no sparse kernel takes it"
    out, channels = weight_of(module).shape[:2]
    fits = channels % TENSORRT_IN == 0 and out % TENSORRT_OUT == 0
    if fits or spec.kernels == "any" or (pattern.n, pattern.m) != (2, 4):
        return None
    return (
        f"TensorRT's 2:4 kernels ask for input channels in multiples of {TENSORRT_IN} and output channels in "
        f"multiples of {TENSORRT_OUT}, and it has {channels} and {out}"
    )


def _note(module: nn.Module, pattern: Pattern) -> str:
    weight = weight_of(module)
    if pattern.kind != "nm":
        return "no engine is faster for zeros anywhere"
    if (pattern.n, pattern.m) != (2, 4):
        return f"no engine has {pattern} kernels"
    if not large_enough(tuple(weight.shape)):
        return f"few channels: rarely faster below {NOTEWORTHY_CHANNELS}"
    return "large enough to gain"


def weight_of(module: nn.Module) -> Tensor:
    """The weight; a parametrized one is not computed, unless of several tensors as in weight_norm."""
    if parametrize.is_parametrized(module, "weight"):
        chains: Any = module.parametrizations
        if chains["weight"].is_tensor:
            return tensor_of(chains["weight"], "original")
    return tensor_of(module)


def run_order(
    model: nn.Module, layers: dict[str, nn.Module], example_inputs: Inputs, others: dict[str, str] | None = None
) -> list[str]:
    """Paths of `layers` in the order in which they run, in evaluation mode (SparsityError: the model fails).

    Parameters of two or more axes that functions take as weights are added to `others`.
    """
    order: dict[str, None] = {}

    def note(path: str, *_: Any) -> None:
        order.setdefault(path)

    try:
        eager = torch.compiler.set_stance("force_eager")  # compiled calls skip hooks
        with hooked(layers, note), modes_restored(model), torch.no_grad(), eager, _Weights() as weights:
            run_with(model.eval(), as_inputs(example_inputs))
    except (RuntimeError, ValueError, TypeError) as error:
        raise SparsityError(f"the model fails on the example inputs: {error}") from error
    if others is not None:
        owned = {id(p) for layer in layers.values() for p in layer.parameters()}
        for path, parameter in model.named_parameters():
            if id(parameter) in weights.taken - owned and parameter.dim() > 1 and path not in others:
                others[path] = type(model.get_submodule(path.rpartition(".")[0])).__name__
    return list(order)
