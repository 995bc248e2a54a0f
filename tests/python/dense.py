"""The definition once more, in numpy and independent of the library, for tests to hold results against."""

import numpy as np


def attention(query, key, value, starts, lengths, visible, scale=None, softcap=0.0, slopes=None, sinks=None):
    """float64 (out, lse) of dense keys. visible(request, q_pos[:, None], kv_pos[None, :]) is a boolean array."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    group, scale = query.shape[1] // key.shape[1], scale or query.shape[2] ** -0.5
    out, lse, end = np.zeros((*query.shape[:2], value.shape[2])), np.full(query.shape[1::-1], -np.inf), 0
    for r, (begin, stop, length) in enumerate(zip(starts[:-1], starts[1:], lengths, strict=True)):
        end += length
        kv_pos, q_pos = np.arange(length)[None], np.arange(length - stop + begin, length)[:, None]
        for h in range(query.shape[1]):
            s = scale * query[begin:stop, h] @ key[end - length : end, h // group].T
            s = softcap * np.tanh(s / softcap) if softcap else s
            s = s - (0 if slopes is None else np.broadcast_to(slopes, (len(lengths), query.shape[1]))[r, h]) * abs(
                q_pos - kv_pos
            )
            s = np.where(visible(r, q_pos, kv_pos), s, -np.inf)
            s = np.concatenate([s, np.full((stop - begin, 1), -np.inf if sinks is None else sinks[h])], axis=1)
            top = s.max(axis=1, keepdims=True)
            top = np.where(np.isfinite(top), top, 0)
            with np.errstate(divide="ignore"):
                lse[h, begin:stop] = (top[:, 0]) + np.log(np.exp(s - top).sum(axis=1))
            weights = np.exp(s - top)[:, :-1] / np.maximum(np.exp(s - top).sum(axis=1, keepdims=True), 1e-300)
            out[begin:stop, h] = weights @ value[end - length : end, h // group]
    return out, lse


def causal(_, q_pos, kv_pos):
    return kv_pos <= q_pos


def everything(_, q_pos, kv_pos):
    return (q_pos < np.inf) & (kv_pos < np.inf)
