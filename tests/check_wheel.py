"""What a wheel must be: small, and enough by itself to multiply. Run by `make wheel`."""

import os
import sys

import mlx.core as mx

import mlx_gguf as gg

limit = 3_000_000
size = os.path.getsize(sys.argv[1])
assert size < limit, f"the wheel has {size} bytes, more than {limit}"
weight = mx.zeros((2, gg.find_format("q4_k").row_bytes(256)), mx.uint8)
y = gg.quantized_matmul(mx.ones((3, 256)), weight, "q4_k", stream=mx.cpu)
assert y.shape == (3, 2)
assert not y.any()
print(f"{sys.argv[1]}: {size} bytes, works")
