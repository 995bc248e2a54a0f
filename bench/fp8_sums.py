"""What 8-bit weights and the tensor cores' short sums cost, modelled in float64: docs/forward_sm90_many_rows_f8.md.

Each row compares with float64 on the same 8-bit inputs, beside the error that rounding those inputs has made."""

import math

import ml_dtypes
import numpy as np

ROWS, TILE, BITS, LOG2_LARGEST, LOG2_RISE = 17, 128, 14, 8, 16
SCALES = [5 / 448, 24 / 448, 6 / 448]  # of query, key, value


def to_e4m3(values):
    return np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def cut(sums):
    mantissa, exponent = np.frexp(sums)
    return np.ldexp(np.trunc(mantissa * 2**BITS) / 2**BITS, exponent)


def multiply(a, b, start=0.0):
    """a @ b as the tensor cores add: products of k = 32 at a time, each sum cut."""
    for k in range(0, a.shape[1], 32):
        start = cut(start + a[:, k : k + 32] @ b[k : k + 32])
    return start


def attend(query, key, value):
    scores = query @ key.T / math.sqrt(query.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights @ value / weights.sum(axis=1, keepdims=True)


def attend_in_8_bits(query, key, value, two_levels, scale_of_step):
    """The kernel's steps; query, key and value are numbers of e4m3."""
    dim = query.shape[1]
    scores = multiply(query, key.T) * (SCALES[0] * SCALES[1] / math.sqrt(dim) * math.log2(math.e))
    unit = np.full((len(query), 1), -np.inf)
    out, total = np.zeros((len(query), value.shape[1])), np.zeros((len(query), 1))
    for begin in range(0, len(key), TILE):
        step = scores[:, begin : begin + TILE]
        largest = step.max(axis=1, keepdims=True) - LOG2_LARGEST
        moved = np.where(largest > unit + (LOG2_RISE if scale_of_step else 0), largest, unit)
        decay, unit = np.exp2(unit - moved), moved
        base = largest if scale_of_step else unit
        weights, factor = np.exp2(step - base), np.exp2(base - unit)
        total = total * decay + weights.sum(axis=1, keepdims=True) * factor
        if two_levels:
            product = multiply(to_e4m3(weights), value[begin : begin + TILE])
            out = (out * decay + product * factor).astype(np.float32).astype(np.float64)
        else:
            out = multiply(to_e4m3(weights), value[begin : begin + TILE], out * decay)
    return out / total * SCALES[2]


def errors(dim, num_keys, has_needle):
    random = np.random.default_rng(7)
    query = random.standard_normal((ROWS, dim))
    key = random.standard_normal((num_keys, dim))
    value = 0.5 + random.standard_normal((num_keys, dim))
    if has_needle:
        key[num_keys // 2 + 77] = query.sum(axis=0) * (math.log(num_keys) + 0.5) / math.sqrt(dim)
    in_8_bits = [to_e4m3(values / scale) for values, scale in zip((query, key, value), SCALES, strict=True)]
    exact = attend(query, key, value)
    of_rounded = attend(*(values * scale for values, scale in zip(in_8_bits, SCALES, strict=True)))
    yield of_rounded - exact, exact
    for two_levels, scale_of_step in ((True, True), (True, False), (False, False)):
        yield attend_in_8_bits(*in_8_bits, two_levels, scale_of_step) - of_rounded, exact


def main():
    print("| | rounding the inputs | two levels, scale of the step | two levels, running maximum | one level |")
    print("|---|---|---|---|---|")
    for dim, num_keys in ((128, 131072), (128, 16384), (256, 32768)):
        for has_needle in (True, False):
            norms = [
                np.linalg.norm(error) / np.linalg.norm(exact) for error, exact in errors(dim, num_keys, has_needle)
            ]
            name = f"D {dim}, {num_keys} keys" + (", needle" if has_needle else "")
            print(f"| {name} | " + " | ".join(f"{100 * norm:.2f}" for norm in norms) + " |", flush=True)


if __name__ == "__main__":
    main()
