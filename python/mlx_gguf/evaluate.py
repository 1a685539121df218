"""How good a model is: perplexity on a text, and its distance from a reference model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

__all__ = ["Comparison", "Evaluation", "Window", "evaluate", "windows"]

# Elements of one array of logits: 128 MiB in float32, 135 tokens of 248,320 words.
_LOGITS = 1 << 25


@dataclass(frozen=True)
class Window:
    """Tokens the model reads at once, and which of them count.

    Attributes
    ----------
    ids : tuple of int
        What the model reads, the BOS included.
    first : int
        Index into ``ids`` of the first token that is scored; all after it are too.
    """

    ids: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class Comparison:
    """A model against a reference on the same tokens.

    Attributes
    ----------
    perplexity : float
        Of the reference.
    kl, kl_error : float
        Mean of KL(reference || model) over the scored tokens, in nats, and its standard
        error.
    agreement, agreement_error : float
        Part of the scored tokens, 0 to 1, for which both hold the same token to be the
        likeliest, and its standard error.
    """

    perplexity: float
    kl: float
    kl_error: float
    agreement: float
    agreement_error: float


@dataclass(frozen=True)
class Evaluation:
    """A model on a text.

    Attributes
    ----------
    tokens : int
        Tokens scored.
    windows : int
        Windows they were read in.
    loss, loss_error : float
        Mean of -log(probability) over the scored tokens, in nats, and its standard error.
    perplexity, perplexity_error : float
        ``exp(loss)``, and ``perplexity * loss_error``.
    comparison : Comparison or None
        The distance from the reference, if there was one.
    """

    tokens: int
    windows: int
    loss: float
    loss_error: float
    perplexity: float
    perplexity_error: float
    comparison: Comparison | None


def windows(
    ids: Sequence[int], *, context: int = 512, stride: int | None = None, bos: int | None = None
) -> list[Window]:
    """Cut tokens into windows so that each is scored once.

    Parameters
    ----------
    ids : sequence of int
        The text, without a BOS.
    context : int, optional
        Tokens of a window, the BOS included. Default: ``512``.
    stride : int, optional
        Tokens from the start of a window to the start of the next. Default: as many as
        a window has of the text, so that windows do not overlap. Less makes windows
        overlap; the tokens that an earlier window has scored are then context only.
    bos : int, optional
        Token to put before each window. Without one, the first token of the text is
        not scored, nor is the first of any window that overlaps none.

    Returns
    -------
    list of Window
        In the order of the text. The last may be shorter; a token that nothing stands
        before makes no window.

    Raises
    ------
    ValueError
        ``context`` is less than 2, ``stride`` not between 1 and a window's part of the
        text, or nothing is left to score.
    """
    head = () if bos is None else (bos,)
    body = context - len(head)
    if context < 2:
        raise ValueError(f"[eval] Expected a context of at least 2 tokens. Received {context}.")
    stride = body if stride is None else stride
    if not 1 <= stride <= body:
        raise ValueError(
            f"[eval] Expected a stride of 1 to {body} tokens, what a window of {context} has of "
            f"the text. Received {stride}."
        )
    found, done = [], 0
    for start in range(0, len(ids), stride):
        end = min(start + body, len(ids))
        if end > done:
            first = max(len(head) + done - start, 1)
            window = Window((*head, *ids[start:end]), first)
            if first < len(window.ids):
                found.append(window)
            done = end
    if not found:
        raise ValueError(
            f"[eval] Expected a text with a token that another stands before. Received {len(ids)} "
            f"token{'s' * (len(ids) != 1)}."
        )
    return found


def evaluate(
    model: Any,
    parts: Sequence[Window],
    *,
    reference: Any = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Measure a model on windows of a text.

    Each window is read from an empty cache, in chunks whose logits take 128 MiB. They are
    cast to float32 before the softmax, whatever the model's dtype; means are taken in
    float64. Standard errors are those of the mean of independent values, which tokens
    of a text are only roughly.

    Parameters
    ----------
    model : mlx.nn.Module
        As :func:`mlx_gguf.load` or ``mlx_lm.load`` returns it.
    parts : sequence of Window
        From :func:`windows`.
    reference : mlx.nn.Module, optional
        A model of the same vocabulary to measure the distance from.
    progress : callable, optional
        Called with the number of windows done and of all, before each and at the end.

    Returns
    -------
    Evaluation

    Raises
    ------
    ValueError
        The two models' logits are not of the same vocabulary.
    """
    vocabulary = _vocabulary(model)
    if reference is not None and _vocabulary(reference) != vocabulary:
        raise ValueError(
            f"[eval] Expected a reference with the model's vocabulary, {vocabulary} tokens. "
            f"Received {_vocabulary(reference)}."
        )
    size = max(1, _LOGITS // vocabulary)
    rows = []
    for i, window in enumerate(parts):
        progress(i, len(parts))
        rows.append(_score(model, reference, window, size))
    progress(len(parts), len(parts))
    columns = np.concatenate(rows, axis=1)
    loss, loss_error = _mean(columns[0])
    comparison = None
    if reference is not None:
        comparison = Comparison(_exp(_mean(columns[1])[0]), *_mean(columns[2]), *_mean(columns[3]))
    perplexity = _exp(loss)
    return Evaluation(
        columns.shape[1],
        len(parts),
        loss,
        loss_error,
        perplexity,
        perplexity * loss_error,
        comparison,
    )


def _vocabulary(model: Any) -> int:
    # Shapes are known without running anything.
    return model(mx.array([[0]])).shape[-1]


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _mean(values: np.ndarray) -> tuple[float, float]:
    """The mean and its standard error, which a single value does not have."""
    n = len(values)
    error = float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return float(values.mean()), error


def _score(model: Any, reference: Any, window: Window, size: int) -> np.ndarray:
    """The scores of a window's tokens, a column for each, float64.

    Rows are the loss and, with a reference, its loss, KL divergence and agreement.
    """
    columns = []
    chunks = _log_probabilities(model, window, size)
    others = _log_probabilities(reference, window, size) if reference is not None else None
    for targets, ours in chunks:
        rows = [-mx.take_along_axis(ours, targets[:, None], axis=-1)[:, 0]]
        if others is not None:
            _, theirs = next(others)
            rows += [
                -mx.take_along_axis(theirs, targets[:, None], axis=-1)[:, 0],
                _divergence(theirs, ours),
                (theirs.argmax(axis=-1) == ours.argmax(axis=-1)).astype(mx.float32),
            ]
        columns.append(np.array(mx.stack(rows)).astype(np.float64))
    return np.concatenate(columns, axis=1)


def _divergence(p: mx.array, q: mx.array) -> mx.array:
    """KL(p || q) in nats over the last axis, of log-probabilities."""
    # What p excludes counts for nothing, also where q excludes it: 0 * (-inf - -inf).
    return mx.where(mx.isneginf(p), 0, mx.exp(p) * (p - q)).sum(axis=-1)


def _log_probabilities(
    model: Any, window: Window, size: int
) -> Iterator[tuple[mx.array, mx.array]]:
    """For each `size` tokens those scored, (n,), and their log-softmax, (n, V) float32."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    end = len(window.ids) - 1  # The last token is only predicted.
    for start in range(0, end, size):
        stop = min(start + size, end)
        logits = model(mx.array([window.ids[start:stop]]), cache=cache)[0]
        # Logits at i are about token i + 1.
        skip = max(window.first - 1 - start, 0)
        if skip < stop - start:
            scored = logits[skip:].astype(mx.float32)
            log_p = scored - mx.logsumexp(scored, axis=-1, keepdims=True)
            yield mx.array(window.ids[start + skip + 1 : stop + 1]), log_p
        mx.eval([c.state for c in cache])
