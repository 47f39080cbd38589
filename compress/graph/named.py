"""Layers whose parameters keep the names that they had in a module that was not a layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Named(nn.Module):
    """A layer whose `weight` and `bias` have other `names` in the state_dict; mixed in before the layer's class."""

    names: dict[str, str]

    @property
    def weight(self) -> Tensor:
        """The parameter stored as `names["weight"]`."""
        return self._parameters[self.names["weight"]]  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The parameter stored as `names["bias"]`."""
        return self._parameters[self.names["bias"]]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(self.__dict__.get("names", {}).get(name, name), value)


def stored_name(layer: nn.Module, name: str) -> str:
    """Name in the state_dict of a layer's `weight` or `bias`."""
    return str(layer.names[name]) if isinstance(layer, Named) else name


class NamedLinear(Named, nn.Linear):  # type: ignore[misc,override]
    """`nn.Linear` with parameters under other names; input (..., in_features)."""
