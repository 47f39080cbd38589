"""Compares a rewritten network with the original on the example inputs, and refuses one that computes otherwise.

Calls leave a model as it was (`restored`): only what a forward pass changed is written back, because another thread may
run the same model. torch.fx replaces methods of `nn.Module` for the whole process while it traces, so two traces may
not overlap (`alone`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pickle import PicklingError
from types import MemberDescriptorType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from compress.errors import CompressWarning, ModelError, first_few
from compress.graph.inputs import Inputs, as_inputs, copies_of, each_input, flat_tensors, hooked, run_with, shapes_text
from compress.graph.report import Block
from compress.support.meters import decibel

P = ParamSpec("P")
R = TypeVar("R")

_ONE = threading.RLock()


def _renew() -> None:
    global _ONE
    _ONE = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def fast_path(*, enabled: bool) -> Iterator[None]:
    # Of torch's transformers in evaluation: it returns zeros for tokens that src_key_padding_mask hides, if those are
    # the last ones; training and files compute them.
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def alone(function: Callable[P, R]) -> Callable[P, R]:
    """Let calls wait for those of other threads, and compute without autocast, default device and fast paths."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _ONE, contextlib.ExitStack() as stack:
            stack.enter_context(fast_path(enabled=False))
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            if torch.is_inference_mode_enabled():  # parameters made in it could not be trained
                stack.enter_context(torch.inference_mode(False))
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore the modes and the buffers of all modules afterwards, plain attributes, and those that became symbolic."""
    states = [
        (module, module.training, dict(vars(module)), dict(module._parameters), dict(module._buffers))
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)  # Python cannot write its attributes
    ]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, training, attributes, parameters, buffers in states:
            for table, before in (vars(module), attributes), (module._parameters, parameters):
                _take_back(table, before)
            if any(module._buffers.get(name) is not value for name, value in buffers.items()):
                module._buffers.update(buffers)
            for name in [name for name in module._buffers if name not in buffers]:
                del module._buffers[name]
            if module.training != training:
                module.training = training
        with torch.no_grad():
            for buffer, value in values:
                if not equal(buffer, value):  # an expanded constant is not written to
                    buffer.copy_(value)


def _take_back(table: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in list(table.items()):
        if name not in before:
            if _is_symbolic(value):
                del table[name]
        elif value is not before[name] and (_is_symbolic(value) or isinstance(value, (int, float, str))):
            table[name] = before[name]


def _is_symbolic(value: Any) -> bool:
    return any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves(value))


def equal(a: Tensor, b: Tensor) -> bool:
    """True if two tensors have the same shape and values; NaN equals nothing."""
    return a.shape == b.shape and torch.equal(a, b)


# Largest relative error of a rewritten network.
TOLERANCE = 1e-3
_ROUNDING = 2.0**-23  # relative distance of neighbouring float32 numbers
_REPEATS = 1e-5  # largest relative error of two calls of one network, whose sums a GPU may add in another order
_AMPLIFIED = 8  # how far beyond one sample of the network's own rounding errors another may be


def relative_error(reference: Any, result: Any) -> float:
    """Largest error of a result (tensor or container of tensors), relative to its tensor's largest magnitude.

    Infinity if the number of tensors, a shape, or the places of NaN and infinity differ.

    >>> relative_error(torch.tensor([1.0, -4.0]), torch.tensor([1.5, -4.0]))
    0.125
    """
    left, right = flat_tensors(reference), flat_tensors(result)
    if len(left) != len(right):
        return float("inf")
    return max((_tensor_error(a, b) for a, b in zip(left, right, strict=True)), default=0.0)


def same_results(reference: Any, result: Any) -> bool:
    return relative_error(reference, result) <= TOLERANCE


def _tensor_error(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.is_complex() != b.is_complex():
        return float("inf")
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.detach().to(wide), b.detach().to(a.device, wide)
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    if not bool((same | (a.isfinite() & b.isfinite())).all()):
        return float("inf")
    difference = torch.where(same, 0.0, (a - b).abs()).max().item()
    size = torch.where(a.isfinite(), a.abs(), 0.0).max().item()
    return difference / size if size else float("inf")


@dataclass
class Noise:
    """Powers of a signal and of the noise in it, summed over tensors."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, signal: Any, value: Any) -> None:
        for exact, rounded in zip(flat_tensors(signal), flat_tensors(value), strict=True):
            self.signal += exact.double().square().sum().item()
            self.noise += (exact.double() - rounded.double()).square().sum().item()

    @property
    def decibel(self) -> float:
        return decibel(self.signal, self.noise)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A network in evaluation mode, before it is rewritten, and its results; it must not change meanwhile."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    results: Any
    name: str

    @classmethod
    def of(cls, model: nn.Module, example_inputs: Inputs) -> Reference:
        """Run a network once; it keeps its mode (ModelError: it fails on the inputs)."""
        inputs = as_inputs(example_inputs)
        return cls(model=model, inputs=inputs, results=run_model(fresh(model), inputs), name=type(model).__name__)

    def difference(self, rewritten: nn.Module) -> float:
        """The relative error of a rewritten network; 0 within `TOLERANCE`, or if rounding explains it."""
        error = relative_error(self.results, run_model(rewritten, self.inputs))
        return 0.0 if error <= TOLERANCE or self._explained(rewritten) else error

    def check(self, rewritten: nn.Module, what: str) -> None:
        error = self.difference(rewritten)
        if not error:
            return
        place = first_difference(self.model, rewritten, self.inputs)
        raise ModelError(
            f"{what} changes what {self.name} computes, by {error:.2g} of its largest output"
            f"{f', first at {place}' if place else ''}: write that part in another way, or leave it out of "
            "the rewriting (keep BatchNorm, no equalization, no smoothing, or a leaf); please report it with the model"
        )

    def _explained(self, rewritten: nn.Module) -> bool:
        """True if the difference is small in float64, or no larger than that by rounding the weights."""
        for dtype in (torch.float64, torch.float32):
            inputs = each_input(partial(_in_type, dtype=dtype), self.inputs)
            exact, moved, other = (copy.deepcopy(m).to(dtype) for m in (self.model, self.model, rewritten))
            _shake(moved)
            try:
                results = [run_model(network, inputs) for network in (exact, moved, other)]
            except ModelError:
                continue  # a network that fixes its types does not run in float64
            error, own = relative_error(results[0], results[2]), relative_error(results[0], results[1])
            return error <= max(TOLERANCE, _AMPLIFIED * own)
        return False


def _in_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def run_model(model: nn.Module, inputs: tuple[Tensor, ...], *, fast: bool = False) -> object:
    """The results of a model on copies of inputs, in evaluation mode and without gradients; mode and buffers stay."""
    try:
        with torch.no_grad(), restored(model), fast_path(enabled=fast):
            return run_with(model.eval(), copies_of(inputs))
    except Exception as error:  # a model can fail in any way
        raise ModelError(
            f"{type(model).__name__} fails on inputs of {shapes_text(inputs)}: {error}; give example_inputs that the "
            "model accepts, on the model's device"
        ) from error


_UNCOPIED = (TypeError, RuntimeError, ValueError, AttributeError, PicklingError)


def own_copy(model: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """A deep copy in evaluation mode, with `shared` tensors; what cannot be copied, such as a lock, is shared too."""
    for part in model.modules():
        own = [item for cls in type(part).__mro__ for item in vars(cls).items()]
        slots = [name for name, kind in own if isinstance(kind, MemberDescriptorType) and hasattr(part, name)]
        if slots:
            raise ModelError(
                f"{type(part).__name__} keeps {slots[0]} in __slots__, which copies of a torch module lose: remove "
                "__slots__ from the class"
            )
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    try:
        return copy.deepcopy(model, dict(memo)).eval()
    except _UNCOPIED:
        for value in tree_leaves([vars(module) for module in model.modules()]):
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()  # computed in an earlier forward, or by a hook
            elif not isinstance(value, (Tensor, nn.Module)):
                try:
                    copy.deepcopy(value)
                except _UNCOPIED:
                    memo[id(value)] = value
        return copy.deepcopy(model, memo).eval()


def fresh(model: nn.Module) -> nn.Module:
    """A copy that shares the parameters: what its calls leave (caches, counters) stays out of the model."""
    return own_copy(model, model.parameters())


def check_stateless(model: nn.Module, example_inputs: Inputs) -> bool:
    """Refuse a model whose results depend on earlier calls; True if its first call leaves anything on it.

    A buffer that its forward writes without an effect on later results causes a `CompressWarning`.
    """
    inputs, own = as_inputs(example_inputs), fresh(model)
    with torch.no_grad():
        before = _state(own)
        first = run_with(own, copies_of(inputs))
        written = [name for name, value in _state(own).items() if before.get(name) != value]
    if not written:
        return False
    with torch.no_grad():
        first, own = copy.deepcopy(first), fresh(model)
        run_with(own, each_input(lambda x: x / 2 if x.is_floating_point() else x, inputs))
        results = [copy.deepcopy(run_with(own, copies_of(inputs))) for _ in range(2)]
    if max(relative_error(first, result) for result in results) > _REPEATS:
        raise ModelError(
            f"{type(model).__name__} gives other results for the same inputs after other calls: its forward writes "
            f"{first_few(written)}, and a graph or a file keeps nothing from call to call; give it that state as an "
            "input, compute without it in evaluation mode, or, if the first call alone sets it, call the model once "
            "before, on the images that shall set it"
        )
    buffers = [name for name, _ in model.named_buffers() if name in written]
    if buffers:
        warnings.warn(
            f"the forward of {type(model).__name__} writes {first_few(buffers)} in evaluation mode: its quantized "
            "network and a file of it may not",
            CompressWarning,
            stacklevel=2,
        )
    return True


def _state(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for path, module in model.named_modules():
        for name, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
            content = len(value) if isinstance(value, (list, dict, set)) else 0
            if isinstance(value, nn.Parameter):
                content = value._version
            elif isinstance(value, Tensor) and value.layout == torch.strided and value.device.type != "meta":
                # Its version stays where a forward writes to `.data`.
                content = hash(value.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
            found[f"{path}.{name}".lstrip(".")] = (id(value), content)
    return found


@torch.no_grad()
def _shake(model: nn.Module) -> None:
    """Change every weight by one unit of its last place in float32, up or down at random; in place."""
    generator = torch.Generator().manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
            tensor.mul_(1 + _ROUNDING * signs.to(tensor))


def first_difference(model: nn.Module, rewritten: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    """Path of the first module of a rewritten graph from which on its values differ from the model's; "" if none does.

    A folded BatchNorm is compared as the layer that holds it. The search goes back from the output.
    """
    if not isinstance(rewritten, fx.GraphModule):
        return ""
    before = module_results(model, inputs)
    after = module_results(rewritten, inputs)
    gone = [value for path, values in before.items() if path not in after for value in values]
    nodes = {node: i for i, node in enumerate(rewritten.graph.nodes)}
    values = _by_call(rewritten, after)
    expected = _by_call(rewritten, before)
    differing: set[fx.Node] = set()
    waiting, seen = [node for node in nodes if node.op == "output"], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "call_module":
            if any(same_results(value, values[node]) for value in (expected.get(node), *gone)):
                continue
            differing.add(node)
        waiting += node.all_input_nodes
    return str(min(differing, key=nodes.__getitem__).target) if differing else ""


def _by_call(graph_module: fx.GraphModule, results: dict[str, list[Any]]) -> dict[fx.Node, Any]:
    left = {path: iter(values) for path, values in results.items()}
    calls = [node for node in graph_module.graph.nodes if node.op == "call_module"]
    return {node: next(left.get(str(node.target), iter(())), None) for node in calls}


def module_results(
    model: nn.Module, inputs: tuple[Tensor, ...], paths: Collection[str] | None = None
) -> dict[str, list[Any]]:
    """Copies of the results of modules (None = all), one for each call, by path (ModelError: the model fails)."""
    found: dict[str, list[Any]] = {}

    def keep(path: str, _module: nn.Module, _inputs: Any, result: Any) -> None:
        copied = tree_map(lambda value: value.detach().clone() if isinstance(value, Tensor) else value, result)
        found.setdefault(path, []).append(copied)

    called = ((path, m) for path, m in model.named_modules() if path and not isinstance(m, Block))
    modules = {path: m for path, m in called if paths is None or path in paths}
    with hooked(modules, keep):
        run_model(model, inputs)
    return found
