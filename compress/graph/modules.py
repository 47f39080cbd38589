"""Modules that graphs hold: by mode, with parameters under other names, or with parametrizations that can be pickled.

`copy.deepcopy` shares the class that torch makes, so a parametrization is removed without changing it (`bake`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.utils import parametrize


@contextmanager
def modes_restored(*models: nn.Module | None) -> Iterator[None]:
    modes = [(module, module.training) for model in models if model is not None for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def register_picklable(module: nn.Module, name: str, part: nn.Module) -> None:
    """Register `part` as a parametrization of the tensor `module.name`; the module pickles afterwards.

    The tensor stays the same object, as `parametrizations.<name>.original`. `part` must keep shape and type, which is
    not checked.
    """
    parametrize.register_parametrization(module, name, part, unsafe=True)
    type(module).__reduce_ex__ = _reduce  # type: ignore[assignment,method-assign]


def bake(module: nn.Module, name: str) -> None:
    """Make the tensor `module.name` a plain one, with the value that its parametrizations compute; in place.

    Deep copies keep theirs, unlike after torch's `remove_parametrizations`. The `original` stays the same object; a
    tensor computed from several becomes a new parameter.
    """
    chains: Any = module.parametrizations
    cls = type(module)
    value: Tensor = getattr(module, name).detach()
    plain = chains[name].original if chains[name].is_tensor else nn.Parameter(value.clone())
    plain.data = value.clone()
    del chains[name]
    if len(chains):
        own = {key: part for key, part in vars(cls).items() if key not in {name, "__dict__", "__weakref__"}}
        module.__class__ = type(cls.__name__, cls.__bases__, own)
    else:
        del module._modules["parametrizations"]
        module.__class__ = cls.__bases__[0]
    if isinstance(plain, nn.Parameter):
        module.register_parameter(name, plain)
    else:
        module.register_buffer(name, plain)


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    chains: Any = module.parametrizations
    state = dict(module.__dict__)
    state["_modules"] = {key: child for key, child in module._modules.items() if key != "parametrizations"}
    parts = {name: (chain.original, list(chain)) for name, chain in chains.items()}
    return _rebuild, (type(module).__bases__[0], state, parts)


def _rebuild(cls: type[nn.Module], state: dict[str, Any], parts: dict[str, tuple[Any, list[nn.Module]]]) -> nn.Module:
    module = cls.__new__(cls)
    module.__dict__.update(state)
    for name, (original, chain) in parts.items():
        kind = module._parameters if isinstance(original, nn.Parameter) else module._buffers
        kind[name] = original
        for part in chain:
            register_picklable(module, name, part)
    return module


class Named(nn.Module):
    """A layer whose `weight` and `bias` have other `names` in the state_dict; mixed in before the layer's class."""

    names: dict[str, str]

    @property
    def weight(self) -> Tensor:
        return self._parameters[self.names["weight"]]  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return self._parameters[self.names["bias"]]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(self.__dict__.get("names", {}).get(name, name), value)


def stored_name(layer: nn.Module, name: str) -> str:
    return str(layer.names[name]) if isinstance(layer, Named) else name


class NamedLinear(Named, nn.Linear):  # type: ignore[misc,override]
    """`nn.Linear` with parameters under other names; input (..., in_features)."""


class InTraining(nn.Module):
    """Computes a part of a network in training, and returns its first input in evaluation."""

    def __init__(self, part: fx.GraphModule) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor, *others: Any) -> object:
        return self.part(x, *others) if self.training else x


class ByMode(nn.Module):
    """A constant that has one value in training and another in evaluation, such as a rate of dropout."""

    def __init__(self, training: Any, evaluation: Any) -> None:
        super().__init__()
        self.values = (training, evaluation)

    def forward(self) -> object:
        return self.values[0] if self.training else self.values[1]
