"""GGUF tensors in MLX: operations, tensor types and files."""

from collections.abc import Mapping, Sequence

import mlx.core


built_with_mlx: str = '0.32.4'

built_with_nanobind: str = '3.1.0'

running_mlx: str = '0.32.4'

shares_mlx_types: bool = True

def set_leak_warnings(value: bool) -> None: ...

class Format:
    """
    One tensor type of GGUF.

    Attributes
    ----------
    name : str
        As GGUF spells it, in lower case: ``"q4_k"``.
    id : int
        ggml's number of the type, as stored in files.
    block_size : int
        Weights in a block. Blocks lie along a row of K weights.
    block_bytes : int
        Bytes of a block.
    alignment : int
        Alignment in bytes of a block in an aligned tensor; 0 if unsupported.
    supported : bool
        Whether the operations take the type. Others can be inspected only.
    tolerance : float
        Bound on the relative L2 error of a float32 result against float64.
    packed : bool
        Whether weights come as packed bytes rather than plain numbers.
    bits_per_weight : float
    """

    @property
    def name(self) -> str: ...

    @property
    def id(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def alignment(self) -> int: ...

    @property
    def supported(self) -> bool: ...

    @property
    def tolerance(self) -> float: ...

    @property
    def packed(self) -> bool: ...

    @property
    def bits_per_weight(self) -> float: ...

    def row_bytes(self, K: int) -> int: ...

    def __repr__(self) -> str: ...

def formats() -> list[Format]:
    """Every tensor type known by name, ordered by id."""

def find_format(name_or_id: int | str) -> Format | None:
    """The type of a name (in any case) or ggml id, or None."""

def quantized_matmul(x: mlx.core.array, w: mlx.core.array, /, qtype: str, transpose: bool = True, *, stream: mlx.core.DeviceType | mlx.core.Stream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array:
    """
    Multiply by a matrix in a GGUF tensor type.

    Computes ``x @ W.T``, or ``x @ W`` when ``transpose`` is false, where ``W`` of
    shape ``(N, K)`` is read as packed in the file. Products are exact and summed
    in float32; the result is rounded once, to the dtype of ``x``. A row's result
    does not depend on the other rows of ``x``. On CUDA both end at 256 rows of a
    16-bit ``x`` and a packed ``W`` of 2**20 to 2**27 weights: they are rounded to
    the dtype of ``x`` and multiplied by MLX, unless ``MLX_GGUF_CUDA_DENSE=0`` is
    in the environment.

    Parameters
    ----------
    x : array
        Activations ``[..., K]`` (``[..., N]`` when ``transpose`` is false);
        float16, bfloat16 or float32.
    w : array
        Packed weights, uint8 ``[N, row_bytes]``; or a batch of them
        ``[..., N, row_bytes]`` whose batch axes broadcast with those of ``x``.
        Weights of type f32, f16 and bf16 may also come in their own dtype,
        ``[..., N, K]``.
    qtype : str
        Tensor type as GGUF names it, in any case: ``"q4_k"``. See ``formats()``.
    transpose : bool
        Whether ``W`` is transposed.
    stream : Stream or Device, optional

    Returns
    -------
    array
        ``[..., N]`` (``[..., K]`` when ``transpose`` is false), dtype of ``x``.

    Raises
    ------
    ValueError
        Unknown or unsupported type, or shapes or dtypes that do not fit.
    """

def quantized_matmul_parts(x: mlx.core.array, w: mlx.core.array, qtype: str, ends: Sequence[int], bias: mlx.core.array | None = None, /) -> list[mlx.core.array]:
    """
    ``mx.split(quantized_matmul(x, w, qtype), ends, -1)``, or that of
    quantized_addmm with a bias, as one node.
    """

def quantized_addmm(c: mlx.core.array, x: mlx.core.array, w: mlx.core.array, /, qtype: str, alpha: float = 1.0, beta: float = 1.0, transpose: bool = True, *, stream: mlx.core.Stream | mlx.core.DeviceType | mlx.core.Device | None = None) -> mlx.core.array:
    """
    Multiply by a matrix in a GGUF tensor type and add.

    Computes ``alpha * x @ W.T + beta * c`` in float32 and rounds once.

    Parameters
    ----------
    c : array
        Broadcasts to the product's shape; any floating dtype, cast to that of ``x``.
    x, w, qtype, transpose, stream
        As in :func:`quantized_matmul`.
    alpha, beta : float

    Returns
    -------
    array
        Shape of the product, dtype of ``x``.

    Raises
    ------
    ValueError
        As :func:`quantized_matmul`, or ``c`` does not broadcast.
    """

def gather_qmm(x: mlx.core.array, w: mlx.core.array, /, qtype: str, lhs_indices: mlx.core.array | None = None, rhs_indices: mlx.core.array | None = None, transpose: bool = True, *, sorted_indices: bool = False, stream: mlx.core.Stream | mlx.core.DeviceType | mlx.core.Device | None = None) -> mlx.core.array:
    """
    Multiply gathered matrices: a mixture of experts.

    For every pair of indices computes ``x[lhs] @ W[rhs].T`` (or ``x[lhs] @
    W[rhs]``), where the indices run over the flattened batch of ``x`` and over the
    experts of ``w``.

    Parameters
    ----------
    x : array
        Activations ``[..., M, K]``; float16, bfloat16 or float32.
    w : array
        Packed experts, uint8 ``[E, N, row_bytes]``.
    qtype : str
        Tensor type as GGUF names it, in any case.
    lhs_indices, rhs_indices : array, optional
        Integers that broadcast against each other; all of ``x`` and all experts
        when left out.
    transpose : bool
        Whether the experts are transposed.
    sorted_indices : bool
        A promise that ``rhs_indices`` ascend, which may be faster.
    stream : Stream or Device, optional

    Returns
    -------
    array
        ``[indices..., M, N]``, dtype of ``x``.

    Raises
    ------
    ValueError
        Unknown or unsupported type, or shapes or dtypes that do not fit.
    RuntimeError
        An index out of range; raised when the result is evaluated, on the CPU.
    """

def dequantize(w: mlx.core.array, /, qtype: str, dtype: mlx.core.Dtype | None = None, *, stream: mlx.core.Stream | mlx.core.DeviceType | mlx.core.Device | None = None) -> mlx.core.array:
    """
    The numbers behind packed weights.

    Parameters
    ----------
    w : array
        Packed weights, uint8 ``[..., row_bytes]``.
    qtype : str
        Tensor type as GGUF names it, in any case.
    dtype : Dtype, optional
        float32 (the default), float16 or bfloat16. Values are those of the format
        in float32, rounded once.
    stream : Stream or Device, optional

    Returns
    -------
    array
        ``[..., K]`` in ``dtype``.

    Raises
    ------
    ValueError
        Unknown or unsupported type, rows that are not whole blocks, other dtypes.
    """

def set_native_ops(on: bool) -> None: ...

def native_ops() -> bool: ...

class OpenFile:
    """An open GGUF file or split set."""

    def paths(self) -> list: ...

    @property
    def version(self) -> int: ...

    def keys(self) -> list: ...

    def value(self, index: int) -> object: ...

    def value_type(self, index: int) -> tuple[str, str | None, int | None]: ...

    def tensors(self) -> list: ...

    def array(self, index: int, later: bool = False) -> mlx.core.array: ...

def release_pages(array: mlx.core.array) -> None: ...

def open_file(path: bytes, copy: bool = False) -> OpenFile: ...

def cpu_isa() -> str:
    """The instruction set in use; MLX_GGUF_ISA overrides it."""

def cpu_isas() -> list[str]:
    """The instruction sets of this machine, the best first."""

def cpu_threads() -> int:
    """Threads of a product; MLX_GGUF_NUM_THREADS overrides it."""

def read_seconds(a: mlx.core.array) -> float:
    """Seconds in which all threads read the array's bytes once."""

def peak_f32() -> float:
    """
    Float32 operations a second of all threads that do nothing but
    multiply and add, with the instructions of cpu_isa().
    """

def peak_int8() -> float:
    """The same of int8 dot products; 0.0 where cpu_isa() is without them."""

def cpu_rms_norm(x: mlx.core.array, weight: mlx.core.array | None, eps: float, stream: mlx.core.Stream | mlx.core.DeviceType | mlx.core.Device | None = None) -> mlx.core.array | None:
    """mx.fast.rms_norm as one node; None where MLX's is to be called."""

def cpu_rope(x: mlx.core.array, dims: int, traditional: bool, base: float | None, scale: float, offset: int | mlx.core.array, freqs: mlx.core.array | None = None, stream: mlx.core.Stream | mlx.core.DeviceType | mlx.core.Device | None = None) -> mlx.core.array | None:
    """mx.fast.rope as one node; None where MLX's is to be called."""

def cpu_gate(x: mlx.core.array, gelu: bool, stream: mlx.core.Stream | mlx.core.DeviceType | mlx.core.Device | None = None) -> mlx.core.array | None:
    """
    nn.gelu_approx, or nn.silu, as one node; None where MLX's is to be called.
    """

def cpu_logsumexp(x: mlx.core.array, stream: mlx.core.Stream | mlx.core.DeviceType | mlx.core.Device | None = None) -> mlx.core.array | None:
    """
    mx.logsumexp over the last axis, which is kept, as one node; None where
    MLX's is to be called.
    """

def cpu_attention(q: mlx.core.array, k: mlx.core.array, v: mlx.core.array, scale: float, causal: bool = False, mask: mlx.core.array | None = None, stream: mlx.core.Stream | mlx.core.DeviceType | mlx.core.Device | None = None) -> mlx.core.array | None:
    """
    mx.fast.scaled_dot_product_attention as one node, without sinks; None
    where MLX's is to be called.
    """

def load_cuda(path: str) -> None:
    """
    Load the CUDA backend from its shared object; RuntimeError if it does not load.
    """

def has_cuda() -> bool:
    """Whether the CUDA backend is loaded."""

def cuda_info() -> dict[str, str]:
    """
    What the CUDA backend says of its device, driver, compiler and cache; empty if it is not loaded.
    """

def cuda_kernels() -> list[tuple[str, str, int]]:
    """
    Every CUDA kernel: its name, its C++ function and the least architecture (80 or 90) that has it, whether or not CUDA is here.
    """

def cuda_compile(products: Sequence[tuple[str, str, int, int, int, int, bool]], functions: Sequence[str] = []) -> None:
    """
    Make the kernels of products, and others by their C++ names, on many threads, and wait; without CUDA do nothing. Of each product: the type and x's dtype by name, M (0: the numbers of W), N, K, experts (0: none; else M pairs of a row and one of them), and whether it is ``x @ W.T``.
    """

def cuda_delta_function(dtype: str, width: int) -> str:
    """
    The C++ name of the gated delta rule's kernel for numbers of a dtype's name, so many a head.
    """

def cuda_launch(qtype: str, dtype: str, M: int, N: int, K: int) -> dict:
    """How a product of 1 to 8 rows is launched on an H200, for benchmarks."""

def cuda_plan_for(qtype: str, dtype: str, M: int, N: int, K: int, transpose: bool = True) -> str:
    """
    The plan of ``x @ W.T`` on an H200, x ``[M, K]`` of a dtype's name and W ``[N, K]``.
    """

def gated_delta(q: mlx.core.array, k: mlx.core.array, v: mlx.core.array, g: mlx.core.array, beta: mlx.core.array, state: mlx.core.array, mask: mlx.core.array | None) -> tuple[mlx.core.array, mlx.core.array] | None:
    """Outputs and last states as one node; None where no kernel takes them."""

class Plan:
    """
    A kernel choice; ``str(plan)`` is its name in files.

    Attributes
    ----------
    kernel : str
        ``"gemv"``, ``"gemm"``, ``"gather_gemm"``, ``"dequantize"`` or ``"matmul"``.
    rows : int
        Of a gemv: weight rows taken together; by a simdgroup, or a CPU's task.
    columns : int
        Of a gemv on a GPU: rows of x that one read of the weights serves.
    transpose : bool
        Whether for ``x @ W.T`` rather than ``x @ W``.
    """

    @property
    def kernel(self) -> str: ...

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def transpose(self) -> bool: ...

    def same_order(self, other: Plan) -> bool:
        """Whether both sum a row's products in the same order."""

    def __eq__(self, other: object, /) -> bool: ...

    def __str__(self) -> str: ...

    def __repr__(self) -> str: ...

def backends() -> list[str]:
    """Names of the backends that can run here."""

def plan_candidates(backend: str, qtype: str) -> list[Plan]:
    """Every plan that a tensor type can have on a backend."""

def plan_for(backend: str, qtype: str, dtype: str, M: int, N: int, K: int, tuned: bool = True) -> Plan:
    """
    The plan of ``x @ W.T``, x ``[M, K]`` of a dtype's name and W ``[N, K]``; without ``tuned``, what it is when none is stored.
    """

def set_plans(backend: str, qtype: str, dtype: str, N: int, K: int, plans: Mapping[int, str]) -> None:
    """
    Store plans for the products with an ``[N, K]`` matrix, for this process.

    Parameters
    ----------
    backend, qtype, dtype : str
        Names, such as ``"cpu"``, ``"q4_k"`` and ``"float16"``.
    N, K : int
    plans : dict of int to str
        Plans by the rows of x they serve, a power of two of at most 1024; fewer
        rows are rounded up to it. A gemv needs those of 1, 2, 4 and 8.

    Raises
    ------
    ValueError
        A plan that the backend does not have for the type, plans of several
        kernels, or of a gemv whose sums differ in order.
    """

def clear_plans() -> None:
    """Forget all stored plans."""

def stored_plans() -> list[dict]:
    """The stored plans as arguments of set_plans()."""

def metal_kernels() -> list[str]:
    """Names of all Metal kernels, whether or not Metal is here."""

def metal_kernel_name(plan: Plan, qtype: str, dtype: str) -> str:
    """The Metal kernel of a plan."""

class Stack:
    """A model's layers and its last norm."""

    def __init__(self, norm: mlx.core.array, *, inner: int, heads: int, kv_heads: int, head_dim: int, gated: bool, eps: float, scale: float, traditional: bool, gain: float, speeds: Sequence[float], delta: tuple[int, int, int, int, bool], experts: tuple[int, int, int, bool]) -> None: ...

    def add_layer(self, *, input_norm: mlx.core.array, in_: Sequence[tuple[mlx.core.array, str, mlx.core.array | None]], q_norm: mlx.core.array | None, k_norm: mlx.core.array | None, delta: tuple[mlx.core.array, mlx.core.array, mlx.core.array, mlx.core.array, mlx.core.array] | None, output: tuple[mlx.core.array, str, mlx.core.array | None], mlp_norm: mlx.core.array, gate_up: Sequence[tuple[mlx.core.array, str, mlx.core.array | None]], down: tuple[mlx.core.array, str, mlx.core.array | None] | None, experts: tuple[mlx.core.array, Sequence[tuple[mlx.core.array, str, mlx.core.array | None]], tuple[mlx.core.array, str, mlx.core.array | None]] | None) -> None:
        """Layers in their order; ValueError where shapes do not fit."""

    @property
    def cuda_functions(self) -> list[str]:
        """C++ names of CUDA kernels for it, beside those of products."""

    @property
    def dtype(self) -> mlx.core.Dtype:
        """Of activations."""

class History:
    """What layers keep, which steps write to in place."""

    @property
    def capacity(self) -> int:
        """Tokens it has room for."""

    def nbytes(self, layer: int) -> int:
        """Of a layer's cache."""

def begin_history(stack: Stack, first: Sequence[mlx.core.array], second: Sequence[mlx.core.array], length: int) -> History | None:
    """
    A copy of a cache's two arrays a layer; of keys and values of the first
    ``length`` rows, with room for more. None if they are not the stack's.
    """

def step(history: History, x: mlx.core.array, position: int, last: mlx.core.array | None, /) -> mlx.core.array | None:
    """
    All layers and the last norm as one node; None where the layers are to
    be called. ``last`` is what the step before gave.
    """

def read_history(history: History, layer: int, last: mlx.core.array | None) -> tuple[mlx.core.array, mlx.core.array]:
    """
    What a layer keeps after the step that gave ``last``; no other may
    follow.
    """

def splits(tokens: list[str], order: list[int]) -> list[tuple[str, str]]:
    """Pairs of tokens whose union is a token of `order`, in that order."""

def cut_at_spaces(texts: list[str]) -> list[tuple[str, str]]:
    """Texts in two, without their first space."""
