"""Parametrizations (torch.nn.utils.parametrize) on modules that can still be pickled.

torch makes a class on the fly for every parametrized module and refuses to pickle it. A module registered here pickles
as its own class with the plain parameters, beside the parametrizations to put on again; `copy.deepcopy` works as
torch made it.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.nn.utils import parametrize


def register_picklable(module: nn.Module, name: str, part: nn.Module) -> None:
    """Register `part` as a parametrization of the tensor `module.name`; the module pickles afterwards.

    Args:
        module: any module.
        name: of a parameter or buffer, which stays the same object, as `parametrizations.<name>.original`.
        part: maps the tensor to one of the same shape and type, which is not checked.
    """
    parametrize.register_parametrization(module, name, part, unsafe=True)
    type(module).__reduce_ex__ = _reduce  # type: ignore[assignment,method-assign]


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
