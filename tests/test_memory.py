"""What loading and decoding take beside the mapped file: little, and nothing is expanded."""

from __future__ import annotations

import os

import mlx.core as mx
import pytest

from subprocesses import run

MIB = 1 << 20

CODE = """
import sys
import mlx.core as mx
import mlx_gguf as gg
from mlx_gguf.load import load_model
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma3_text, llama  # loaded before the count starts

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) << 10

mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))
start = peak()
f = gg.open(sys.argv[1])
opened = peak()
model = load_model(f)
loaded = peak()
list(generate_step(mx.array([1, 2, 3, 4, 5]), model, max_tokens=8))
print(opened - start, loaded - opened, peak() - loaded)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux only")
@pytest.mark.skipif(mx.is_available(mx.gpu), reason="a device may need a copy")
@pytest.mark.parametrize("fixture", ["gemma", "smollm2"])
def test_peaks_of_opening_loading_and_decoding(fixture, request):
    """In float16 the weights would take 2 to 3.5 times the file."""
    path = request.getfixturevalue(fixture)
    size = os.path.getsize(path)
    opened, loaded, decoded = map(int, run(CODE, path).split())
    assert opened < 16 * MIB
    assert loaded < 32 * MIB
    assert size / 2 < decoded < size + 64 * MIB  # the mapped pages that were read, and little else
