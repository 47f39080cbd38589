"""`RULES`: for each kind of operation, from its operands' fields to its result's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compress.graph.traits import kinds
from compress.receptive import rules_mixing, rules_moving, rules_windows
from compress.receptive.call import Call, NoRuleError
from compress.receptive.fields import Field, join

Rule = Callable[[Call], Any]


def _elementwise(call: Call) -> Field:
    """Each element depends on the same element of the operand."""
    return call.field(0)


def _broadcasting(call: Call) -> Field:
    return join(call.operands(), call.result_shape(), call.name)


RULES: dict[str, Rule] = {
    **dict.fromkeys(kinds(lambda t: t.elementwise and t.data_inputs == 1), _elementwise),
    **dict.fromkeys(kinds(lambda t: t.elementwise and t.data_inputs > 1), _broadcasting),
    **rules_windows.RULES,
    **rules_mixing.RULES,
    **rules_moving.RULES,
}


def apply_rule(call: Call) -> Any:
    """Return a Field, a tuple of them, or a plain value (a shape).

    Raises:
        NoRuleError: there is no rule, or it does not cover these arguments.
    """
    rule = RULES.get(call.kind)
    if rule is None:
        raise NoRuleError("there is no rule for this kind of operation")
    return rule(call)
