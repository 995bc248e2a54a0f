"""The same model without qkv: what generate.py --verify holds every step against."""

from typing import Any

import numpy as np
from smollm2 import Model


class DenseModel:
    """Plain numpy attention over a dense store of its own. Shares no pages, so it computes all of each prompt."""

    def __init__(self, model: Model, kv_dtype: np.dtype) -> None:
        self.model = model
        self.dtype = kv_dtype
        self.stores: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self.largest_difference = 0.0
        self.num_compared = 0
        self.margins: list[float] = []  # of tokens that differ: the best logit over that of the token taken

    def begin_step(self, step: list[tuple[Any, int]]) -> None:
        self.step = []
        empty = np.zeros((0, self.model.num_kv_heads, self.model.head_dim), self.dtype)
        for request, count in step:
            store = self.stores.setdefault(request.number, [(empty, empty)] * self.model.num_layers)
            self.step.append((request, len(store[0][0]), request.num_computed + count))

    def attend(self, layer: int, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        out, row = np.empty_like(query), 0
        for request, begin, end in self.step:
            rows = slice(row, row + end - begin)
            old_keys, old_values = self.stores[request.number][layer]
            keys = np.concatenate([old_keys, key[rows].astype(self.dtype)])
            values = np.concatenate([old_values, value[rows].astype(self.dtype)])
            self.stores[request.number][layer] = (keys, values)
            out[rows] = dense_attention(query[rows], keys.astype(np.float32), values.astype(np.float32))
            row = rows.stop
        return out

    def compare(self, step: list[tuple[Any, int]], sampled: list[int], logits: np.ndarray) -> None:
        self.begin_step(step)
        tokens = [token for request, begin, end in self.step for token in request.tokens[begin:end]]
        positions = np.concatenate([np.arange(begin, end) for _, begin, end in self.step])
        ends = np.cumsum([end - begin for _, begin, end in self.step]) - 1
        hidden = self.model.forward(tokens, positions, self.attend)
        expected = self.model.logits(hidden[ends[sampled]])
        # maximum keeps a NaN, so that one cannot pass for agreement.
        self.largest_difference = float(np.maximum(self.largest_difference, np.abs(logits - expected).max(initial=0)))
        taken, best = logits.argmax(-1), expected.argmax(-1)
        rows = np.flatnonzero(taken != best)
        self.margins += (expected[rows, best[rows]] - expected[rows, taken[rows]]).tolist()
        self.num_compared += len(sampled)


def dense_attention(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """query [q_len, num_q_heads, head_dim]; key, value [kv_len, num_kv_heads, head_dim]; causal."""
    group = query.shape[1] // key.shape[1]
    q, k, v = (x.transpose(1, 0, 2) for x in (query, key.repeat(group, axis=1), value.repeat(group, axis=1)))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(np.float32(query.shape[2]))
    hidden = np.triu(np.ones(scores.shape[1:], bool), k=1 + len(key) - len(query))
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights @ v / weights.sum(axis=-1, keepdims=True)).transpose(1, 0, 2)
