"""The C++ text that is compiled, made from a unit of Metal source."""

from __future__ import annotations

from .source import (
    _BUILTINS1,
    _FLOAT,
    Function,
    Kernel,
    SourceError,
    Token,
    Unit,
    matching,
    split_commas,
    untokenize,
)


def rewrite(unit: Unit, wanted: list[str] | None, launchers: bool) -> tuple[str, list[Kernel]]:
    """Rewrite a unit in place.

    Parameters
    ----------
    unit : Unit
        The unit; its tokens are changed.
    wanted : list of str or None
        Kernels to keep; the explicit instantiations of others are dropped. None keeps all.
    launchers : bool
        Whether launch functions are added (not wanted when only types are checked).

    Returns
    -------
    tuple
        The C++ text and the kernels in it.
    """
    kernels = _kernels(unit, wanted, launchers)
    for f in unit.functions:
        if f.is_kernel:
            _threadgroup_variables(unit, f)
    _function_constants(unit)
    _constructors(unit)
    _literals(unit)
    return untokenize(unit.tokens), kernels


def _launcher(kernel: Kernel, target: str) -> str:
    arguments = []
    for i, p in enumerate(kernel.parameters):
        kind = f"::mtl::parameter<F, {i}>::type"
        if p.kind != "builtin":
            arguments.append(f"::mtl::buffer<{kind}>::from(slots[{i}])")
        elif p.builtin in _BUILTINS1:
            arguments.append(f"({kind})({_BUILTINS1[p.builtin]})")
        else:
            arguments.append(f"::mtl::builtin3<{kind}>(mtl_lane->{p.builtin})")
    return (
        f'extern "C" void {kernel.launcher}(void* const* slots) {{ '
        f"typedef decltype({target}) F; {target}({', '.join(arguments)}); (void)slots; }}"
    )


def _kernels(unit: Unit, wanted: list[str] | None, launchers: bool) -> list[Kernel]:
    found: list[tuple[str, str, Function, Token]] = []
    for inst in unit.instantiations:
        f = unit.kernel_function(inst.base)
        if f is None:
            continue
        tokens = unit.tokens
        if wanted is not None and inst.name not in wanted:
            for t in tokens[inst.start : inst.end + 1]:
                t.text = ""
            continue
        for t in tokens[inst.start : inst.end]:
            t.text = "" if t.text == "kernel" else t.text
        found.append((inst.name, inst.target, f, tokens[inst.end]))
    for f in unit.functions:
        plain = f.is_kernel and unit.tokens[f.head].text != "template"
        if plain and (wanted is None or f.name in wanted):
            found.append((f.name, f.name, f, unit.tokens[f.end]))
    kernels: list[Kernel] = []
    for i, (name, target, f, last) in enumerate(found):
        kernel = Kernel(name, f"mtl_launch_{i}", f.parameters, f.max_threads)
        if any(k.name == name for k in kernels):
            raise SourceError(f"two kernels are called {name}")
        if launchers:
            last.after += " " + _launcher(kernel, target)
        kernels.append(kernel)
    missing = set(wanted or []) - {k.name for k in kernels}
    if missing:
        raise SourceError(f"no kernel called {', '.join(sorted(missing))} in the source")
    return kernels


def _threadgroup_variables(unit: Unit, f: Function) -> None:
    """Bind ``threadgroup T name[n];`` to guarded memory of the emulator."""
    tokens = unit.tokens
    i = f.body
    site = 0
    while i < f.end:
        if tokens[i].text != "threadgroup" or tokens[i - 1].text not in (";", "{", "}", ":", ""):
            i += 1
            continue
        end = next(j for j in range(i, f.end) if tokens[j].text == ";")
        parts = split_commas(tokens, i + 1, end)
        top = [t.text for t in tokens[i:end]]
        if "=" in top or any(_indirect(tokens, a, b) for a, b in parts):
            i = end  # A pointer to threadgroup memory.
            continue
        first, last = parts[0]
        name_at = _declared_name(tokens, first, last)
        kind = _words(tokens, first, name_at)
        text = ""
        for n, (a, b) in enumerate(parts):
            at = name_at if n == 0 else _declared_name(tokens, a, b)
            alias = f"mtl_threadgroup_{site}"
            text += f"typedef {kind} {alias}{_words(tokens, at + 1, b)}; "
            text += f"threadgroup {alias}& {tokens[at].text} = "
            text += f"::mtl::threadgroup_variable<{alias}, {site}>(); "
            site += 1
        newlines = "".join("\n" * t.before.count("\n") for t in tokens[i + 1 : end])
        tokens[i].text = text.rstrip(" ;") + newlines
        for t in tokens[i + 1 : end]:
            t.text = t.before = ""
        i = end


def _indirect(tokens: list[Token], start: int, end: int) -> bool:
    depth = 0
    for t in tokens[start:end]:
        depth += t.text in ("(", "[", "<")
        depth -= t.text in (")", "]", ">")
        if depth == 0 and t.text in ("*", "&"):
            return True
    return False


def _declared_name(tokens: list[Token], start: int, end: int) -> int:
    depth = 0
    name = -1
    for i in range(start, end):
        text = tokens[i].text
        if text == "[" and depth == 0:
            break
        depth += text in ("(", "<")
        depth -= text in (")", ">")
        if depth == 0 and tokens[i].kind == "name":
            name = i
    if name < 0:
        raise SourceError(f"{tokens[start]}: no name in this threadgroup declaration")
    return name


def _words(tokens: list[Token], start: int, end: int) -> str:
    """The tokens' text on one line, without alignas(...)."""
    words, i = [], start
    while i < end:
        if tokens[i].text == "alignas":
            i = matching(tokens, i + 1)
        else:
            words.append(tokens[i].text)
        i += 1
    return " ".join(words)


def _function_constants(unit: Unit) -> None:
    """Bind ``constant T name [[function_constant(n)]];`` to a value given at launch."""
    for start, end in unit.statements:
        part = unit.tokens[start:end]
        for a in part:
            if a.attribute[:1] == ["function_constant"]:
                words = [t.text for t in part if t.text and t.text not in ("constant", "const")]
                index = "".join(a.attribute[2:-1])
                kind, name = " ".join(words[:-1]), words[-1]
                for t in part:
                    t.text = ""
                part[0].text = (
                    f"struct mtl_fc_{name} {{ operator {kind}() const {{ return "
                    f"*static_cast<const {kind}*>(mtl_function_constant({index})); }} }}; "
                    f"static const mtl_fc_{name} {name}{{}}"
                )


def _constructors(unit: Unit) -> None:
    """``float4(a, b)`` and ``static_cast<float4>(a)`` become calls of the emulator's."""
    tokens = unit.tokens
    names = unit.type_names()
    for i, t in enumerate(tokens[:-1]):
        previous = tokens[i - 1].text if i else ""
        if t.kind != "name" or previous in ("operator", ".", "->", "~"):
            continue
        if t.text == "static_cast":
            close = matching(tokens, i + 1)
            inside = {x.text for x in tokens[i + 2 : close]}
            if inside & (names | {"vec"}) and not inside & {"*", "&"}:
                t.text = "::mtl::cast"
        elif t.text in names and tokens[i + 1].text == "(":
            if previous in ("struct", "class", "typename", "using", "typedef"):
                continue
            close = matching(tokens, i + 1)
            if tokens[i + 2].text in ("*", "&") and tokens[close + 1].text in ("[", "("):
                continue  # A declarator such as T (&x)[n].
            t.text = f"::mtl::construct<{t.text}>"
        elif t.text == "vec" and tokens[i + 1].text == "<":
            close = matching(tokens, i + 1)
            if tokens[close + 1].text == "(":
                t.text = f"::mtl::construct<{t.text}"
                tokens[close].text = ">>"


def _literals(unit: Unit) -> None:
    """Metal's literals are float unless they end in h or bf."""
    for t in unit.tokens:
        match = _FLOAT.match(t.text) if t.kind == "number" else None
        if not match:
            continue
        value, suffix = match.group("value"), (match.group("suffix") or "").lower()
        is_hex = value[:2].lower() == "0x"
        if not suffix and (is_hex or "." in value or "e" in value.lower()):
            t.text = value + "f"
        elif suffix == "h" and not is_hex:
            t.text = (value if "." in value or "e" in value.lower() else value + ".0") + "f16"
        elif suffix == "bf":
            t.text = f"((bfloat){value}f)"
