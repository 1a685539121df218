"""The table of tensor types against gguf-py's."""

from __future__ import annotations

import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

import mlx_gguf as gg
from blocks import TYPES


def test_ids_and_sizes_equal_gguf_py():
    known = {t.name.lower(): (int(t), *sizes) for t, sizes in GGML_QUANT_SIZES.items()}
    ours = {f.name: (f.id, f.block_size, f.block_bytes) for f in gg.formats()}
    assert {name: ours[name] for name in ours if name in known} == {
        name: known[name] for name in known if name in ours
    }
    assert {f.name for f in gg.formats() if f.supported} == set(TYPES)
    # Whatever gguf-py can put into a file is at least known by name.
    assert set(known) - set(ours) == set()


def test_rows_are_ordered_and_unique():
    ids = [f.id for f in gg.formats()]
    assert ids == sorted(set(ids))
    assert len({f.name for f in gg.formats()}) == len(ids)


@pytest.mark.parametrize("fmt", gg.formats(), ids=lambda f: f.name)
def test_each_row_is_found_and_derives_its_numbers(fmt):
    assert gg.find_format(fmt.name).id == fmt.id
    assert gg.find_format(fmt.name.upper()).id == fmt.id
    assert gg.find_format(fmt.id).name == fmt.name
    assert fmt.bits_per_weight == 8 * fmt.block_bytes / fmt.block_size
    assert fmt.row_bytes(3 * fmt.block_size) == 3 * fmt.block_bytes
    assert fmt.name in repr(fmt)
    assert (fmt.tolerance == 2e-6) == fmt.supported
    if fmt.supported:
        assert fmt.block_bytes % fmt.alignment == 0
        assert fmt.packed == (fmt.block_size > 1)


def test_what_is_unknown():
    assert gg.find_format("q9_k") is None
    assert gg.find_format("") is None
    assert gg.find_format("q4_") is None
    assert gg.find_format(4) is None
    assert gg.find_format(2**32 - 1) is None
    assert gg.find_format("Q4_k").id == GGMLQuantizationType.Q4_K
