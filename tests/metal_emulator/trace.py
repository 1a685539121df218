"""Counts of memory transactions, from a run that recorded every access."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

# Must match TraceRecord in memory.cpp.
RECORD = np.dtype(
    [
        ("offset", "<i8"),
        ("pc", "<u4"),
        ("threadgroup", "<u4"),
        ("thread", "<u2"),
        ("size", "<u2"),
        ("buffer", "<i2"),
        ("store", "<u2"),
    ]
)


@dataclass(frozen=True)
class BufferTraffic:
    """What a kernel did with one buffer (index n), or threadgroup array n (index -1 - n).

    Attributes
    ----------
    size : int
        Bytes in the buffer.
    loaded, stored : int
        Bytes moved by all loads and stores.
    distinct_loaded, distinct_stored : int
        Different bytes among them.
    most_loads_of_a_byte : int
        How often the most loaded byte was loaded.
    widths : dict
        Loads by size in bytes, as the compiler left them.
    runs : dict
        Pieces of contiguous bytes that one lane loaded, by length in bytes: what a compiler
        that merges neighbouring loads could ask for at once.
    instructions : int
        Loads counted once for a whole simdgroup.
    fetched : int
        Bytes that those ask for, each once however many lanes of the instruction want it.
    most_fetches_of_a_byte : int
        In how many of those the most wanted byte is.
    segments : dict
        Segment size (32, 64, 128 bytes) to the number of segments those touch in total.
    """

    index: int
    size: int
    loaded: int
    stored: int
    distinct_loaded: int
    distinct_stored: int
    most_loads_of_a_byte: int
    widths: dict[int, int]
    runs: dict[int, int]
    instructions: int
    fetched: int
    most_fetches_of_a_byte: int
    segments: dict[int, int]


@dataclass(frozen=True)
class TraceReport:
    """Traffic of one launch by buffer index, and the records it was counted from."""

    kernel: str
    buffers: dict[int, BufferTraffic]
    records: np.ndarray

    def __getitem__(self, index: int) -> BufferTraffic:
        return self.buffers[index]

    def __str__(self) -> str:
        lines = [
            f"{'buffer':>6} {'bytes':>9} {'loaded':>9} {'fetched':>9} {'/byte':>5} {'stored':>9}"
            "  load widths; runs of a lane"
        ]
        for b in self.buffers.values():
            times = b.fetched / b.distinct_loaded if b.distinct_loaded else 0.0
            lines.append(
                f"{b.index:>6} {b.size:>9} {b.loaded:>9} {b.fetched:>9} {times:>5.2f} "
                f"{b.stored:>9}  {b.widths}; {b.runs}"
            )
        return f"{self.kernel}\n" + "\n".join(lines)


def take_records(runtime: ctypes.CDLL) -> np.ndarray:
    """Copy the accesses recorded by the last run."""
    pointer = ctypes.c_void_p()
    count = runtime.mtl_trace_records(ctypes.byref(pointer))
    if not count or not pointer.value:
        return np.empty(0, RECORD)
    data = ctypes.string_at(pointer.value, count * RECORD.itemsize)
    return np.frombuffer(data, RECORD)


def _histogram(values: np.ndarray) -> dict[int, int]:
    keys, counts = np.unique(values, return_counts=True)
    return {int(k): int(c) for k, c in zip(keys, counts, strict=True)}


def _times(records: np.ndarray, size: int) -> np.ndarray:
    """How often each byte was touched."""
    steps = np.zeros(size + 1, np.int64)
    np.add.at(steps, records["offset"], 1)
    np.add.at(steps, records["offset"] + records["size"], -1)
    return np.cumsum(steps[:-1])


def _runs(loads: np.ndarray) -> dict[int, int]:
    order = np.lexsort((loads["offset"], loads["thread"], loads["threadgroup"]))
    s = loads[order]
    end = s["offset"] + s["size"]
    joined = (
        (s["threadgroup"][1:] == s["threadgroup"][:-1])
        & (s["thread"][1:] == s["thread"][:-1])
        & (s["offset"][1:] == end[:-1])
    )
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    return _histogram(np.add.reduceat(s["size"].astype(np.int64), starts))


def _instructions(loads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loads with the number of the simdgroup-wide instruction that each belongs to.

    Such an instruction is the lanes' n-th execution of the same load.
    """
    order = np.lexsort((loads["pc"], loads["thread"], loads["threadgroup"]))  # Stable.
    s = loads[order]
    same = (
        (s["threadgroup"][1:] == s["threadgroup"][:-1])
        & (s["thread"][1:] == s["thread"][:-1])
        & (s["pc"][1:] == s["pc"][:-1])
    )
    starts = np.concatenate(([0], np.flatnonzero(~same) + 1))
    lengths = np.diff(np.concatenate((starts, [len(s)])))
    nth = np.arange(len(s)) - np.repeat(starts, lengths)
    keys = np.stack([s["threadgroup"], s["thread"] // 32, s["pc"], nth], axis=1)
    _, which = np.unique(keys, axis=0, return_inverse=True)
    return s, which.reshape(-1).astype(np.int64)


def _pieces(loads: np.ndarray, which: np.ndarray, width: int) -> np.ndarray:
    """The pieces of ``width`` bytes that each instruction touches, all in one array."""
    first = loads["offset"] // width
    count = (loads["offset"] + loads["size"] - 1) // width - first + 1
    owner = np.repeat(np.arange(len(loads)), count)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    piece = first[owner] + nth
    span = int(piece.max(initial=0)) + 1
    return np.unique(which[owner] * span + piece) % span


def summarize(kernel: str, records: np.ndarray, sizes: dict[int, int]) -> TraceReport:
    """Count a launch's records; ``sizes`` gives the bytes of each buffer."""
    buffers = {}
    for index in sorted({*sizes, *(int(b) for b in np.unique(records["buffer"]))}):
        mine = records[records["buffer"] == index]
        loads, stores = mine[mine["store"] == 0], mine[mine["store"] != 0]
        reach = int((mine["offset"] + mine["size"]).max()) if len(mine) else 0
        size = sizes.get(index, reach)
        times = _times(loads, max(size, reach))
        ordered, which = _instructions(loads) if len(loads) else (loads, np.empty(0, np.int64))
        fetched = _pieces(ordered, which, 1)
        buffers[index] = BufferTraffic(
            index=index,
            size=size,
            loaded=int(loads["size"].sum()),
            stored=int(stores["size"].sum()),
            distinct_loaded=int(np.count_nonzero(times)),
            distinct_stored=int(np.count_nonzero(_times(stores, max(size, reach)))),
            most_loads_of_a_byte=int(times.max(initial=0)),
            widths=_histogram(loads["size"]),
            runs=_runs(loads) if len(loads) else {},
            instructions=int(which.max(initial=-1)) + 1,
            fetched=len(fetched),
            most_fetches_of_a_byte=int(np.bincount(fetched).max(initial=0)),
            segments={w: len(_pieces(ordered, which, w)) for w in (32, 64, 128)},
        )
    return TraceReport(kernel, buffers, records)
