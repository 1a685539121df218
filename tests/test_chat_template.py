"""Chat templates come from strangers: they reach nothing, and end."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from mlx_gguf.tokenizer import load_tokenizer
from subprocesses import run

METADATA = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.token_type": [1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
}
MESSAGES = [{"role": "user", "content": "a" * 100}]

ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch escaped') }}",
    "attr-of-function": "{{ raise_exception.__globals__['__builtins__'] }}",
    "format": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "format-map": "{{ '{a.__init__.__globals__}'.format_map({'a': cycler}) }}",
    "attr-filter": "{{ (messages | attr('__class__')).mro() }}",
    "map-attribute": "{{ messages | map(attribute='__class__') | first }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends '/etc/passwd' %}",
    "mutate": "{% set _ = messages.append({'role': 'x'}) %}",
    "mutate-message": "{% set _ = messages[0].update({'role': 'x'}) %}",
    "namespace": "{% set n = namespace(__class__=1) %}",
}

MANY = "range(99999)"
HANGS = {
    "nested-loops": f"{{% for i in {MANY} %}}{{% for j in {MANY} %}}{{% endfor %}}{{% endfor %}}",
    "nested-text": f"{{% for i in {MANY} %}}{{% for j in {MANY} %}}x{{% endfor %}}{{% endfor %}}",
    "long-text": f"{{% for i in {MANY} %}}{'x' * 100_000}{{% endfor %}}",
    "large-range": "{% for i in range(10**9) %}{% endfor %}",
    "endless-macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching-macro": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "recursive-loop": (
        "{% for i in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}"
    ),
    "power": "{{ 9 ** 9 ** 9 }}",
    "growing-number": f"{{% set n = namespace(x=10) %}}{{% for i in {MANY} %}}"
    "{% set n.x = n.x * n.x %}{% endfor %}",
    "repeat": "{{ 'a' * 10 ** 9 * 10 }}",
    "repeat-list": "{{ ([0] * 1000000000) | length }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling-plus": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling-list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling-replace": "{% set n = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set n.x = n.x | replace('a', n.x) %}{% endfor %}",
    "shared-structure": "{% set n = namespace(x=[]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "shared-json": "{% set n = namespace(x=[]) %}{% for i in range(60) %}"
    "{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x | tojson }}",
    "shared-compare": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "indent": "{{ messages | tojson(indent=1000000000) }}",
    "percent": "{{ '%01000000000d' % 1 }}",
    "percent-star": "{{ '%*d' % (1000000000, 1) }}",
    "format-width": "{{ '{:>1000000000}'.format(1) }}",
    "format-filter": "{{ '%1000000000d' | format(1) }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "lists": f"{{% for i in {MANY} %}}{{% set x = {MANY} | list %}}{{% endfor %}}",
    "sums": f"{{% for i in {MANY} %}}{{{{ {MANY} | sum }}}}{{% endfor %}}",
    "sorts": f"{{% for i in {MANY} %}}{{% set x = {MANY} | sort %}}{{% endfor %}}",
    "join": "{{ range(90000) | join('x' * 90000) }}",
    "parentheses": "{{ " + "(" * 100_000 + ")" * 100_000 + " }}",
    "long-sum": "{{ " + "1 + " * 100_000 + "1 }}",
    "nested-blocks": "{% for i in [1] %}" * 200 + "{% endfor %}" * 200,
    "nested-lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "caller": f"{{% macro m() %}}{{% for i in {MANY} %}}{{{{ caller() }}}}{{% endfor %}}"
    "{% endmacro %}{% call m() %}{% call m() %}x{% endcall %}{% endcall %}",
}

RENDER = """
import json, resource, signal, sys
from jinja2 import TemplateError
from mlx_gguf.tokenizer import load_tokenizer
from test_chat_template import HANGS, MESSAGES, METADATA, render

def size():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmSize")) << 10

render("{{ messages[0].content | trim }}")  # everything is imported
resource.setrlimit(resource.RLIMIT_AS, (size() + (1 << 30),) * 2)
for name, template in HANGS.items():
    signal.setitimer(signal.ITIMER_PROF, 20)  # processor time; its end is the end
    try:
        render(template)
        sys.exit(f"{name} rendered")
    except TemplateError as error:
        print(name, str(error)[:100])
"""


def render(template, messages=MESSAGES, **options):
    tokenizer = load_tokenizer(METADATA, chat_template=template)
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_reaches_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    messages = [dict(MESSAGES[0])]
    with suppress(TemplateError):
        assert render(ESCAPES[name], messages) == ""  # an undefined value
    assert messages == MESSAGES
    assert not list(tmp_path.iterdir())


def test_a_template_ends():
    """In a process of its own, with a limit on its processor time and its memory."""
    assert len(run(RENDER).splitlines()) == len(HANGS)


def test_the_error_says_what_is_wrong():
    with pytest.raises(SecurityError, match=r"\[chat_template\] Expected .* Received one that"):
        render(HANGS["nested-loops"])


def test_long_conversations_stay_within_bounds():
    template = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.role ~ ': ' + "
        "m.content.replace('a', 'b').strip() }}{% endif %}{{ messages | length }}\n{% endfor %}"
        "{{ tools | tojson(indent=2) if tools }}"
    )
    messages = [{"role": "user", "content": "a" * 2000} for _ in range(3000)]
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(50)]
    text = render(template, messages, tools=tools)
    assert text.count("user: " + "b" * 2000 + "3000\n") == 3000
    assert json.loads(text[text.rindex("\n[") :]) == tools


def test_features_of_transformers_remain():
    template = (
        "{%- for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if loop.index > 1 %}{% break %}{% endif %}{% endfor -%}"
        "{{ strftime_now('%Y') | length }}{% set n = namespace(a=1) %}{{ n.a }}"
        "{{ {'x': '<é>'} | tojson }}{{ '%s-%05.1f' % ('a', 2) }}{{ 'ab' | upper }}"
        "{{ [1, 2] | map('string') | join(',') }}{{ (messages | first).role }}"
        "{{ messages[0].items() | list | length }}"
    )
    messages = [{"role": "user", "content": c} for c in "xyz"]
    text = render(template, messages)
    assert text == 'xy41{"x": "<é>"}a-002.0AB1,2user2'


def test_templates_of_others_are_rendered_without_bounds():
    from transformers.utils.chat_template_utils import _compile_jinja_template

    nested = "{% for i in range(3000) %}{% for j in range(2000) %}{% endfor %}{% endfor %}"
    assert _compile_jinja_template(nested + "{{ 2 ** 40 }}").render() == str(2**40)
