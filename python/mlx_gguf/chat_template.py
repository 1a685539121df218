"""Chat templates of files, which are programs of strangers, rendered within bounds.

Jinja's sandbox, which transformers uses, keeps a template from Python's objects. It does
not keep it from running for ever or from filling the memory; that is added here: each
rendering may take so many steps, and every value a template handles costs as many as it
is large.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

#: What one rendering may spend: seconds at most, and thousands of long messages with ease.
STEPS = 2_000_000
#: Steps a call costs.
CALL = 20
#: Characters that cost a step.
CHARACTERS = 64
#: What a call may make of its arguments' sizes, multiplied: replace, join, center.
PRODUCT = 1 << 28

# What a rendering on this thread has left; nothing while another one's template is rendered.
_left: ContextVar[list[int] | None] = ContextVar("mlx_gguf_steps", default=None)

# These look at no element of a container, or at one.
_SHALLOW = {"count", "d", "default", "first", "items", "last", "length", "trim"}
_WIDE_FORMAT = re.compile(r"[%:.][^a-zA-Z%}]*\d{5}")


# What Python itself says of templates that recurse, nest too deep or include others.
_FAILURES = (RecursionError, OverflowError, MemoryError, TypeError, SyntaxError)


def _refuse(what: str) -> SecurityError:
    return SecurityError(
        f"[chat_template] Expected a template that stays within {STEPS} steps. Received {what}."
    )


def _spend(steps: int) -> None:
    left = _left.get()
    if left is not None:
        left[0] -= steps
        if left[0] < 0:
            raise _refuse("one that takes more")


def _charge(value: Any) -> None:
    """Spend what a value is large, down to the last element."""
    if _left.get() is None:
        return
    _spend(1)
    if isinstance(value, (str, bytes)):
        _spend(len(value) // CHARACTERS)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            _charge(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _charge(key)
            _charge(item)
    elif isinstance(value, range):
        _spend(len(value))
    elif isinstance(value, int) and value.bit_length() > 4096:
        raise _refuse(f"a number of {value.bit_length()} bits")


def _size(value: Any) -> int:
    if isinstance(value, (str, bytes, list, tuple, dict, range)):
        return max(1, len(value))
    if isinstance(value, (int, float)):
        return max(1, min(abs(int(value)), PRODUCT + 1)) if value == value else 1
    return 1


def _check_call(name: str, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before a call: what it gets is paid for, and it cannot multiply that beyond bounds."""
    if _left.get() is None:
        return
    _spend(CALL)
    product = 1
    for value in (*args, *kwargs.values()):
        product *= _size(value)
        if name not in _SHALLOW:
            _charge(value)
    if product > PRODUCT and name not in _SHALLOW:
        raise _refuse(f"a call of {name} that could make {product} characters")
    if name in ("format", "format_map") and _WIDE_FORMAT.search(str(args[0])):
        raise _refuse("a format of many thousand characters")


class _Filters(dict):
    """A table of filters that hands out guarded ones."""

    def __getitem__(self, name: str) -> Any:
        function = super().__getitem__(name)

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            skipped = 1 if hasattr(function, "jinja_pass_arg") else 0
            if not name.startswith("mlx_gguf_"):
                _check_call(name, args[skipped:], kwargs)
            return function(*args, **kwargs)

        return guarded

    def get(self, name: str, default: Any = None) -> Any:
        # Jinja computes constant output in compiling, by this.
        return self[name] if name in self else default  # noqa: SIM401


def _count(values: Iterable, written: int) -> Iterator:
    """A loop's values, of which each costs a step and the text its turn writes."""
    for value in values:
        _spend(1 + written // CHARACTERS)
        yield value


def _pay(value: Any) -> Any:
    _charge(value)
    return value


class _Guard(NodeTransformer):
    """Puts the filters that spend steps around what loops, writes, joins and compares."""

    def _guarded(self, name: str, node: Any, *args: Any) -> nodes.Filter:
        values = [nodes.Const(a) for a in args]
        return nodes.Filter(node, name, values, [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        written = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        node.iter = self._guarded("mlx_gguf_count", node.iter, written)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            part if isinstance(part, nodes.TemplateData) else self._guarded("mlx_gguf_pay", part)
            for part in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [self._guarded("mlx_gguf_pay", part) for part in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._guarded("mlx_gguf_pay", node.expr)
        return node


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds on steps and sizes while :func:`bounded` renders."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *args: Any, **kwargs: Any):
        # Unoptimised: else constant expressions are computed, unguarded, in compiling.
        super().__init__(*args, **{**kwargs, "optimized": False})
        ours = {"mlx_gguf_count": _count, "mlx_gguf_pay": _pay}
        self.filters: Any = _Filters({**self.filters, **ours})
        del self.globals["lipsum"]  # writes any number of words

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Guard().visit(Environment._parse(self, source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _left.get() is None:
            return super().call_binop(context, operator, left, right)
        if operator == "**" and _size(left) ** min(_size(right), 64) > PRODUCT:
            raise _refuse("a power")
        if operator == "%" and isinstance(left, str):
            _check_call("format", (left, *(right if isinstance(right, tuple) else (right,))), {})
        if operator == "*":
            _check_call("*", (left, right), {})
        value = super().call_binop(context, operator, left, right)
        _charge(value)
        return value

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The sandbox hands out str.format wrapped.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        bound = (owner,) if isinstance(owner, (str, list, dict, int)) else ()
        _check_call(getattr(__obj, "__name__", "a function"), (*bound, *args), kwargs)
        value = super().call(__context, __obj, *args, **kwargs)
        if isinstance(value, str):
            _charge(value)
        return value


# Where transformers gets its sandbox. Templates of others are rendered as before.
chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment  # type: ignore[misc]


def bounded(apply: Callable[..., Any]) -> Callable[..., str]:
    """Make a tokenizer's ``apply_chat_template`` render within bounds, as text.

    Raises
    ------
    jinja2.TemplateError
        The template reaches for what the sandbox keeps from it, takes too many steps,
        makes too large values or fails otherwise.
    """

    @wraps(apply)
    def render(*args: Any, **kwargs: Any) -> str:
        token = _left.set([STEPS])
        try:
            return apply(*args, **{"return_dict": False, **kwargs, "tokenize": False})
        except _FAILURES as error:
            raise TemplateError(
                f"[chat_template] Expected a template that renders. Received {error}."
            ) from error
        finally:
            _left.reset(token)

    return render
