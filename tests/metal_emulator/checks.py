"""What Metal's compiler refuses and an ordinary C++ compiler takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .source import Function, Token, Unit, matching, split_commas

SPACES = {"device", "constant", "threadgroup", "thread", "ray_data", "object_data"}

_WORDS = {
    "double": "double",
    "virtual": "virtual functions",
    "throw": "exceptions",
    "try": "exceptions",
    "catch": "exceptions",
    "new": "new",
    "delete": "delete",
    "dynamic_cast": "dynamic_cast",
    "typeid": "typeid",
    "thread_local": "thread_local",
    "goto": "goto",
    "asm": "asm",
    "wchar_t": "wchar_t",
    "char16_t": "char16_t",
    "char32_t": "char32_t",
    "std": "the C++ standard library",
    "printf": "printf",
    "malloc": "malloc",
    "co_await": "coroutines",
    "co_return": "coroutines",
    "co_yield": "coroutines",
    "concept": "concepts",
    "requires": "concepts",
    "_Float16": "_Float16 (half)",
    "__bf16": "__bf16 (bfloat)",
    "__int128": "__int128",
    "atomic_long": "64-bit atomics",
    "atomic_ulong": "64-bit atomics",
    "atomic_llong": "64-bit atomics",
}


class _Finder:
    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.tokens = unit.tokens
        self.found: list[str] = []

    def add(self, token: Token, what: str) -> None:
        self.found.append(f"{token.file}:{token.line}: Metal does not have {what}")

    def require_space(self, token: Token, what: str) -> None:
        text = f"{token.file}:{token.line}: {what} needs an address space"
        if text not in self.found:
            self.found.append(text)


def check_tokens(unit: Unit) -> list[str]:
    """Problems that can be read off the tokens, one message each."""
    f = _Finder(unit)
    _words(f)
    _statements(f)
    for function in unit.functions:
        _parameters(f, function)
        _locals(f, function)
        if function.is_kernel:
            _kernel(f, function)
    _casts(f)
    _members(f)
    return f.found


def _words(f: _Finder) -> None:
    tokens = f.tokens
    for i, t in enumerate(tokens[:-1]):
        if t.kind != "name":
            continue
        following = tokens[i + 1].text
        if t.text in _WORDS and not (t.text == "delete" and tokens[i - 1].text == "="):
            f.add(t, _WORDS[t.text])
        elif t.text == "long" and following in ("long", "double"):
            f.add(t, f"long {following}")
        elif (t.text, following) == ("atomic", "<") and tokens[i + 2].text in ("long", "ulong"):
            f.add(t, "64-bit atomics")


def _statements(f: _Finder) -> None:
    """Variables at namespace scope and static members must be in the constant space."""
    tokens = f.tokens
    for start, end in f.unit.statements:
        words = [t.text for t in tokens[start:end] if t.text]
        if not words or words[0] in (
            [
                "using",
                "typedef",
                "template",
                "struct",
                "class",
                "enum",
                "union",
                "static_assert",
                "friend",
                "extern",
            ]
        ):
            continue
        head = words[: words.index("=")] if "=" in words else words
        if "operator" in words or ("(" in head and "=" not in words):
            continue  # A declaration of a function.
        member = _inside_struct(f.unit, start)
        if "constant" not in head and ("static" in head or not member):
            f.add(tokens[start], "variables at program scope outside the constant address space")


def _inside_struct(unit: Unit, position: int) -> bool:
    return any(start < position < end for start, end in unit.structs)


def _locals(f: _Finder, function: Function) -> None:
    tokens = f.tokens
    for i in range(function.body + 1, function.end):
        t = tokens[i]
        if t.text == "static":
            f.add(t, "static variables in functions")
        elif t.text == "[" and _starts_expression(tokens[i - 1]):
            f.add(t, "lambda expressions")
        elif t.text == "threadgroup" and tokens[i - 1].text in (";", "{", "}"):
            end = next(j for j in range(i, function.end) if tokens[j].text == ";")
            words = [x.text for x in tokens[i:end]]
            pointer = "*" in words or "&" in words
            if not pointer and not function.is_kernel:
                f.add(t, f"threadgroup variables outside kernels (in {function.name})")
            if not pointer and "=" in words:
                f.add(t, "initialised threadgroup variables")
    for start, end in _declarations(tokens, function):
        _declarators(f, start, end)


def _starts_expression(previous: Token) -> bool:
    return previous.kind not in ("name", "number", "string") and previous.text not in (
        ")",
        "]",
        ">",
        "",
        "}",
    )


def _declarations(tokens: list[Token], function: Function) -> Iterator[tuple[int, int]]:
    """Statements of a body that declare pointers or references: ``type * name``."""
    for i in range(function.body + 1, function.end):
        previous = tokens[i - 1].text
        opens = previous in (";", "{", "}") or (
            previous == "(" and tokens[i - 2].text in ("for", "if", "while")
        )
        if not opens or tokens[i].kind != "name":
            continue
        if tokens[i].text in ("return", "using", "typedef", "delete", "case", "else", "goto"):
            continue
        j = i
        while tokens[j].kind in ("name", "attribute") or tokens[j].text in ("::", "<"):
            if tokens[j].text == "<":
                try:
                    j = matching(tokens, j)
                except Exception:
                    break
            j += 1
        if j > i and tokens[j].text in ("*", "&", "&&"):
            end = j
            while tokens[end].text in ("*", "&", "&&") or tokens[end].text in ("const", *SPACES):
                end += 1
            if tokens[end].kind == "name" and tokens[end + 1].text in (
                "=",
                ";",
                ":",
                ",",
                "[",
                "(",
            ):
                yield i, end


def _declarators(f: _Finder, start: int, end: int) -> None:
    words = [t.text for t in f.tokens[start:end]]
    if not SPACES & set(words) and "auto" not in words:
        f.require_space(f.tokens[start], f"{' '.join(words)} {f.tokens[end].text}")


def _parameters(f: _Finder, function: Function) -> None:
    tokens = f.tokens
    for first, last in split_commas(
        tokens, function.open_parameters + 1, function.close_parameters
    ):
        words = [t.text for t in tokens[first:last] if t.text]
        if "(" in words and words[words.index("(") + 1] == "*":
            f.add(tokens[first], "pointers to functions")
        elif {"*", "&", "&&"} & set(_outside_angles(words)) and not SPACES & set(words):
            f.require_space(tokens[first], f"{' '.join(words)} of {function.name}")


def _outside_angles(words: list[str]) -> list[str]:
    depth, result = 0, []
    for w in words:
        depth += w == "<"
        if depth == 0:
            result.append(w)
        depth -= w == ">"
    return result


def _kernel(f: _Finder, function: Function) -> None:
    tokens = f.tokens
    open_at = function.open_parameters
    if tokens[open_at - 2].text != "void":
        f.add(tokens[open_at - 1], f"kernels that return a value ({function.name})")
    indices: set[tuple[str, int]] = set()
    for p in function.parameters:
        words = set(p.text.split())
        allowed = {"buffer": {"device", "constant"}, "threadgroup": {"threadgroup"}}
        if p.kind in allowed and not words & allowed[p.kind]:
            f.require_space(tokens[open_at], f"kernel argument {p.text}")
        if p.kind != "builtin":
            if (p.kind, p.index) in indices:
                f.add(tokens[open_at], f"two arguments at {p.kind}({p.index})")
            indices.add((p.kind, p.index))
            if p.kind == "buffer" and p.index > 30:
                f.add(tokens[open_at], f"buffer({p.index}); the last is 30")
        elif not words & {"uint", "ushort", "uint2", "ushort2", "uint3", "ushort3"}:
            f.add(tokens[open_at], f"a built-in argument of type {p.text}")


def _casts(f: _Finder) -> None:
    tokens = f.tokens
    for i, t in enumerate(tokens[:-2]):
        if t.text in ("reinterpret_cast", "static_cast", "const_cast"):
            end = matching(tokens, i + 1)
            words = [x.text for x in tokens[i + 2 : end]]
            if {"*", "&"} & set(words) and not SPACES & set(words):
                f.require_space(t, f"{t.text}<{' '.join(words)}>")
        elif t.text == "(" and tokens[i + 1].kind == "name" and tokens[i - 1].kind != "name":
            end = matching(tokens, i)
            words = [x.text for x in tokens[i + 1 : end]]
            if words[-1:] == ["*"] and not SPACES & set(words):
                f.require_space(t, f"({' '.join(words)})")


def _members(f: _Finder) -> None:
    """Pointers in structs, aliases and typedefs."""
    tokens = f.tokens
    for start, end in f.unit.statements:
        words = [t.text for t in tokens[start:end] if t.text]
        if not words or "(" in words or "operator" in words:
            continue
        head = _outside_angles(words[: words.index("=")] if "=" in words else words)
        if words[0] == "using":
            head = _outside_angles(words)
        holds_types = words[0] in ("using", "typedef") or _inside_struct(f.unit, start)
        if holds_types and {"*", "&"} & set(head) and not SPACES & set(words):
            f.require_space(tokens[start], " ".join(words))


_DEFINE = re.compile(r'^define [^@]*@("[^"]+"|[\w.$]+)\(.*?(?:!dbg !(\d+))?\s*\{$')
_CALLEE = re.compile(r'\b(?:call|invoke)\b[^@%]*?(?:[^(]*\) )?([@%])("[^"]+"|[\w.$]+)\(')
_LOCATION = re.compile(r"!dbg !(\d+)$")


@dataclass
class _Body:
    """A function in LLVM text: its name in the source, and its lines."""

    name: str
    lines: list[str]


def _bodies(llvm: str) -> dict[str, _Body]:
    names = dict(re.findall(r'^!(\d+) = distinct !DISubprogram\(name: "([^"]+)"', llvm, re.M))
    bodies: dict[str, _Body] = {}
    current: list[str] | None = None
    for line in llvm.splitlines():
        definition = _DEFINE.match(line)
        if definition:
            symbol = definition.group(1).strip('"')
            current = []
            bodies[symbol] = _Body(names.get(definition.group(2) or "", symbol), current)
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return bodies


def check_calls(llvm: str) -> list[str]:
    """Recursion and calls through pointers, from unoptimised LLVM text."""
    edges: dict[str, set[str]] = {}
    found: list[str] = []
    bodies = _bodies(llvm)
    for symbol, body in bodies.items():
        edges[symbol] = set()
        for line in body.lines:
            callee = _CALLEE.search(line)
            if callee and callee.group(1) == "%":
                found.append(f"{body.name}: Metal does not have calls through pointers")
            elif callee:
                edges[symbol].add(callee.group(2).strip('"'))
    for symbol, body in bodies.items():
        if _reaches(edges, symbol):
            found.append(f"{body.name}: Metal does not have recursion")
    return found


def check_space_casts(llvm: str) -> list[str]:
    """Casts between address spaces that C++ allows in its C notation."""
    lines = dict(re.findall(r"^!(\d+) = !DILocation\(line: (\d+)", llvm, re.M))
    found = []
    for symbol, body in _bodies(llvm).items():
        if "threadgroup_variable" in symbol:
            continue  # The emulator's own way from its memory to threadgroup memory.
        for line in body.lines:
            if "addrspacecast" in line:
                location = _LOCATION.search(line)
                number = lines.get(location.group(1), "?") if location else "?"
                found.append(f"{body.name}: line {number} casts between address spaces")
    return found


_REINTERPRETED = re.compile(r"= bitcast <\d+ x \w+> \S+ to <")
_COMPARED = re.compile(r"= sext <\d+ x i1>")


def check_vectors(llvm: str) -> list[str]:
    """Vector operations that mean something else here than in Metal."""
    lines = dict(re.findall(r"^!(\d+) = !DILocation\(line: (\d+)", llvm, re.M))
    found = []
    for symbol, body in _bodies(llvm).items():
        if symbol.startswith(("_ZN5metal", "_ZN3mtl")):
            continue
        for line in body.lines:
            location = _LOCATION.search(line)
            number = lines.get(location.group(1), "?") if location else "?"
            if _REINTERPRETED.search(line):
                found.append(
                    f"{body.name}: line {number}: this cast of a vector would reinterpret its "
                    "bits here; write the type's constructor"
                )
            elif _COMPARED.search(line):
                found.append(
                    f"{body.name}: line {number}: comparing vectors gives 0 and -1 here, bool in "
                    "Metal; compare their elements"
                )
    return found


def _reaches(edges: dict[str, set[str]], start: str) -> bool:
    """Whether a function can call itself, directly or through others."""
    seen: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name == start:
            return True
        if name not in seen:
            seen.add(name)
            waiting.extend(edges.get(name, ()))
    return False
