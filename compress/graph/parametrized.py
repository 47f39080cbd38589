"""Parametrizations (torch.nn.utils.parametrize) on modules that can still be pickled.

`copy.deepcopy` shares the class that torch makes, so a parametrization is removed without changing it (`bake`).
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.nn.utils import parametrize


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
    chains, cls = cast(Any, module).parametrizations, type(module)
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
    chains = cast(Any, module).parametrizations
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
