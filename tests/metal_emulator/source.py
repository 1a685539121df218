"""Reads Metal source and rewrites the little that C++ spells differently.

The rewritten text keeps every statement of the source. Changed are: attributes (removed and
remembered), ``threadgroup`` variables (bound to guarded memory), constructors and casts of vector
types, and the suffixes of floating-point literals. Each kernel gets a launch function.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<line>\#[^\n]*)
      | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<other>::|->|\.\.\.|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|.)""",
    re.VERBOSE,
)
_FLOAT = re.compile(
    r"^(?P<value>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?|0[xX][0-9a-fA-F]*\.?[0-9a-fA-F]*"
    r"[pP][+-]?\d+)(?P<suffix>[fFhH]|bf|BF)?$"
)
_SCALARS = [
    "char",
    "uchar",
    "short",
    "ushort",
    "int",
    "uint",
    "long",
    "ulong",
    "half",
    "bfloat",
    "float",
    "bool",
]
VECTOR_TYPES = {f"{packed}{s}{n}" for s in _SCALARS for n in "234" for packed in ("", "packed_")}

# Built-in kernel arguments: the member of MtlLane, or an expression.
_BUILTINS3 = [
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_threadgroup",
    "threadgroups_per_grid",
    "threads_per_grid",
]
_BUILTINS1 = {
    "thread_index_in_threadgroup": "mtl_lane->thread_index_in_threadgroup",
    "thread_index_in_simdgroup": "mtl_lane->thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup": "mtl_lane->simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup": "mtl_lane->simdgroups_per_threadgroup",
    "threads_per_simdgroup": "32",
    "thread_execution_width": "32",
    "thread_index_in_quadgroup": "mtl_lane->thread_index_in_simdgroup % 4",
    "quadgroup_index_in_threadgroup": "mtl_lane->thread_index_in_threadgroup / 4",
}


class SourceError(Exception):
    """The source is not what Metal (or this emulator) accepts."""


@dataclass
class Token:
    """A token, the white space and line markers before it, and where it stands."""

    text: str
    kind: str
    before: str
    file: str
    line: int
    attribute: list[str] = field(default_factory=list)
    after: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Parameter:
    """A kernel argument: ``kind`` is buffer, threadgroup or builtin."""

    kind: str
    index: int
    text: str
    builtin: str = ""


@dataclass
class Function:
    """A function definition; positions are indices into the tokens."""

    name: str
    head: int
    open_parameters: int
    close_parameters: int
    body: int
    end: int
    is_kernel: bool
    max_threads: int = 1024
    parameters: list[Parameter] = field(default_factory=list)


@dataclass
class Kernel:
    """A kernel as a host sees it."""

    name: str
    launcher: str
    parameters: list[Parameter]
    max_threads: int


def tokenize(text: str) -> list[Token]:
    """Split preprocessed source into tokens without losing any character."""
    tokens: list[Token] = []
    before, file, line = "", "?", 1
    for match in _TOKEN.finditer(text):
        kind, piece = match.lastgroup or "other", match.group()
        if kind == "line":
            marker = re.match(r'#\s+(\d+)\s+"([^"]*)"', piece)
            if marker:
                file, line = marker.group(2), int(marker.group(1)) - 1
        if kind in ("space", "line"):
            before += piece
        else:
            tokens.append(Token(piece, kind, before, file, line))
            before = ""
        line += piece.count("\n")
    tokens.append(Token("", "end", before, file, line))
    return tokens


def untokenize(tokens: list[Token]) -> str:
    """The text of the tokens."""
    return "".join(t.before + t.text + t.after for t in tokens)


def matching(tokens: list[Token], start: int) -> int:
    """Index of the bracket that closes the one at ``start``; angles count only for ``<``."""
    pairs = {"(": ")", "[": "]", "{": "}", "<": ">"}
    stack: list[str] = []
    for i in range(start, len(tokens)):
        text = tokens[i].text
        if text in ("(", "[", "{") or (text == "<" and tokens[start].text == "<"):
            stack.append(pairs[text])
        elif stack and text == stack[-1]:
            stack.pop()
            if not stack:
                return i
        elif text in (")", "]", "}"):
            while stack and stack[-1] == ">":
                stack.pop()
            if not stack or stack.pop() != text:
                break
            if not stack:
                return i
        elif text == ";" and tokens[start].text == "<":
            break
    raise SourceError(f"{tokens[start]}: no end of this {tokens[start].text!r}")


def split_commas(tokens: list[Token], start: int, end: int) -> list[tuple[int, int]]:
    """Ranges between the commas of tokens[start:end] that are outside all brackets."""
    ranges, depth, first = [], 0, start
    for i in range(start, end):
        text = tokens[i].text
        depth += text in ("(", "[", "{", "<")
        depth -= text in (")", "]", "}", ">")
        if text == "," and depth == 0:
            ranges.append((first, i))
            first = i + 1
    if first < end:
        ranges.append((first, end))
    return ranges


def take_attributes(tokens: list[Token]) -> list[Token]:
    """Turn every ``[[...]]`` into one empty token that remembers its contents."""
    result: list[Token] = []
    i = 0
    while i < len(tokens):
        t = tokens[i]
        if t.text == "[" and tokens[i + 1].text == "[" and tokens[i + 1].before == "":
            end = matching(tokens, i)
            inside = [x.text for x in tokens[i + 2 : end - 1]]
            newlines = "".join(x.before for x in tokens[i : end + 1])
            result.append(Token("", "attribute", newlines, t.file, t.line, inside))
            i = end + 1
        else:
            result.append(t)
            i += 1
    return result


def _strip_template(tokens: list[Token], start: int, end: int) -> int:
    while start < end and tokens[start].text == "template" and tokens[start + 1].text == "<":
        start = matching(tokens, start + 1) + 1
    return start


@dataclass
class Instantiation:
    """An explicit instantiation of a kernel template."""

    start: int
    end: int
    name: str
    base: str
    target: str


class Unit:
    """A preprocessed translation unit: its tokens, functions and kernels."""

    def __init__(self, text: str) -> None:
        self.tokens = take_attributes(tokenize(text))
        self.functions: list[Function] = []
        self.instantiations: list[Instantiation] = []
        self.statements: list[tuple[int, int]] = []  # Outside functions.
        self.structs: list[tuple[int, int]] = []  # Bodies of classes.
        self.vector_types = VECTOR_TYPES
        self._scan()

    def _scan(self) -> None:
        tokens = self.tokens
        start = i = 0
        scopes = 0
        while i < len(tokens):
            text = tokens[i].text
            if text == "(":
                i = matching(tokens, i)
            elif text == "{":
                kind = self._kind_of_brace(start, i)
                if kind == "function":
                    i = self._add_function(start, i)
                    start = i + 1
                elif kind in ("namespace", "struct"):
                    scopes += 1
                    if kind == "struct":
                        self.structs.append((i, matching(tokens, i)))
                    start = i + 1
                else:
                    i = matching(tokens, i)
            elif text == "}":
                if not scopes:
                    raise SourceError(f"{tokens[i]}: a brace too many")
                scopes -= 1
                start = i + 1
            elif text == ";":
                self.statements.append((start, i))
                self._instantiation(start, i)
                start = i + 1
            i += 1

    def _kind_of_brace(self, start: int, brace: int) -> str:
        start = _strip_template(self.tokens, start, brace)
        head = [t.text for t in self.tokens[start:brace] if t.text]
        if "namespace" in head or (head[:1] == ["extern"] and len(head) == 2):
            return "namespace"
        depth = 0
        for text in head:
            depth += text in ("(", "<", "[")
            depth -= text in (")", ">", "]")
            if depth == 0 and text in ("struct", "class", "union"):
                return "struct"
            if depth == 0 and text in ("enum", "="):
                return "initializer"
            if text == "(" and depth == 1:
                return "function"
        return "initializer"

    def _add_function(self, start: int, brace: int) -> int:
        tokens = self.tokens
        head = _strip_template(tokens, start, brace)
        attributes = [t for t in tokens[start:brace] if t.kind == "attribute"]
        i = head
        while tokens[i].text != "(" or tokens[i - 1].text in ("__attribute__", "alignas"):
            i = matching(tokens, i) + 1 if tokens[i].text == "(" else i + 1
        name = tokens[i - 1].text
        if any(t.text == "operator" for t in tokens[head:i]):
            name = "operator"
        end = matching(tokens, brace)
        is_kernel = any(t.text == "kernel" for t in tokens[head:i]) or any(
            a.attribute == ["kernel"] for a in attributes
        )
        f = Function(name, start, i, matching(tokens, i), brace, end, is_kernel)
        for a in attributes:
            if a.attribute[:1] == ["max_total_threads_per_threadgroup"]:
                f.max_threads = int("".join(a.attribute[2:-1]))
        if is_kernel:
            f.parameters = self._parameters(f)
        self.functions.append(f)
        return end

    def _parameters(self, f: Function) -> list[Parameter]:
        tokens = self.tokens
        result: list[Parameter] = []
        for first, last in split_commas(tokens, f.open_parameters + 1, f.close_parameters):
            part = tokens[first:last]
            text = " ".join(t.text for t in part if t.text)
            names = [t.attribute for t in part if t.kind == "attribute"]
            indirect = any(t.text in ("*", "&") for t in part)
            kind, index, builtin = "", -1, ""
            for a in names:
                if a[0] in ("buffer", "threadgroup"):
                    kind, index = a[0], int("".join(a[2:-1]))
                elif a[0] in _BUILTINS3 or a[0] in _BUILTINS1:
                    kind, builtin = "builtin", a[0]
                else:
                    raise SourceError(f"{part[0]}: unknown attribute [[{''.join(a)}]] on {text}")
            if not kind and indirect:
                kind = "buffer"
                index = max([p.index for p in result if p.kind == "buffer"], default=-1) + 1
            if not kind or indirect != (kind != "builtin"):
                raise SourceError(
                    f"{part[0]}: kernel {f.name} needs a pointer or reference with [[buffer(n)]] "
                    f"or a built-in value with its attribute, not {text}"
                )
            result.append(Parameter(kind, index, text, builtin))
        return result

    def _instantiation(self, start: int, end: int) -> None:
        tokens = self.tokens
        while start < end and not tokens[start].text:
            start += 1
        body = [t for t in tokens[start + 1 : end] if t.text]
        if tokens[start].text != "template" or not body or body[0].text == "<":
            return
        name = ""
        for t in tokens[start:end]:
            if t.attribute[:1] == ["host_name"]:
                name = t.attribute[2].strip('"')
        if body[0].text == "decltype":
            # template decltype(fn<A, B>) fn<A, B>;
            target = body[2 : matching(body, 1)]
        else:
            # template kernel void fn<A, B>(device float* x, ...);
            stop = next(i for i, t in enumerate(body) if t.text == "(")
            first = next(i for i, t in enumerate(body) if t.text == "<")
            target = body[first - 1 : stop]
        base = next(t.text for t in target if t.kind == "name" and t.text != "metal")
        text = " ".join(t.text for t in target)
        angle = [t.text for t in target].index("<") if any(t.text == "<" for t in target) else 1
        base = target[angle - 1].text
        self.instantiations.append(Instantiation(start, end, name or base, base, text))

    def kernel_function(self, base: str) -> Function | None:
        """The kernel definition called ``base``."""
        return next((f for f in self.functions if f.is_kernel and f.name == base), None)

    def type_names(self) -> set[str]:
        """Names that may stand for a vector type: aliases and template parameters."""
        names = set(VECTOR_TYPES)
        tokens = self.tokens
        for i, t in enumerate(tokens):
            following = tokens[i + 1] if i + 1 < len(tokens) else t
            if t.text == "using" and tokens[i + 2].text == "=":
                names.add(following.text)
            elif t.text == "typedef":
                end = next(j for j in range(i, len(tokens)) if tokens[j].text == ";")
                names.add(tokens[end - 1].text)
            elif t.text == "template" and following.text == "<":
                for first, last in split_commas(tokens, i + 2, matching(tokens, i + 1)):
                    part = [x.text for x in tokens[first:last]]
                    if part and part[0] in ("typename", "class") and len(part) > 1:
                        names.add(part[1])
        return names - set(_SCALARS) - {"]"}
