"""One rule for each kind of operation: from what its operands' elements see to what its result's elements see.

The rules stand by idea: windows (convolutions, pools, resizes: `rules_windows`), mixing (matrix products, attention,
sums, norms: `rules_mixing`), moving (views, slices, concatenation: `rules_moving`). `RULES` holds them by the
names of `compress.graph.ops`; an operation without a rule, or a rule that cannot answer (`NoRuleError`), makes
the field unknown from there on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compress.receptive_field import rules_mixing, rules_moving, rules_windows
from compress.receptive_field.call import Call, NoRuleError
from compress.receptive_field.fields import Field, join

Rule = Callable[[Call], Any]


def _elementwise(call: Call) -> Field:
    """Each element reads the same element of its operand."""
    return call.field(0)


def _broadcasting(call: Call) -> Field:
    """Each element reads the same element of its operands, broadcast."""
    return join(call.operands(), call.result_shape(), call.name)


_ELEMENTWISE = (
    "batch_norm relu relu6 leaky_relu silu gelu hardswish hardsigmoid sigmoid tanh elu mish softplus clamp dropout "
    "identity neg exp quantizer"
)
_BROADCASTING = "add sub mul div pow floordiv compare"

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_BROADCASTING.split(), _broadcasting),
    **rules_windows.RULES,
    **rules_mixing.RULES,
    **rules_moving.RULES,
}

NAMED_RULES: dict[str, Rule] = {
    "maximum": _broadcasting,
    "minimum": _broadcasting,
    "where": _broadcasting,
    "masked_fill": _broadcasting,
    **rules_windows.NAMED_RULES,
    **rules_moving.NAMED_RULES,
}
"""Rules by the function's own name, for what stands in no table of `compress.graph.ops`."""


def apply_rule(call: Call) -> Any:
    """What the rule of an operation says: a Field, a tuple of them, or a plain value (a shape).

    Raises:
        NoRuleError: there is no rule, or it does not cover these arguments.
    """
    rule = RULES.get(call.kind) or NAMED_RULES.get(call.function)
    if rule is None:
        raise NoRuleError("it stands in no table of operations")
    return rule(call)
