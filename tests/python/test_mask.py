"""Masks with operators: the same text as parse_mask, and the same truth as numpy."""

import struct
import zlib

import numpy as np
import pytest
import qkv
from qkv import mask

Q, K = mask.q_pos(), mask.kv_pos()


@pytest.mark.parametrize(
    ("built", "text"),
    [
        (K <= Q, "kv_pos <= q_pos"),
        (K < Q + 1, "kv_pos < q_pos + 1"),
        (2 + Q - K > 3, "2 + q_pos - kv_pos > 3"),
        (7 - Q >= K, "7 - q_pos >= kv_pos"),
        (64 > Q - K, "q_pos - kv_pos < 64"),  # noqa: SIM300 - the reflected operator
        (mask.q_head() == 2, "q_head == 2"),
        (mask.request() != 0, "request != 0"),
        ((K <= Q) & ((K < mask.operand("prefix_len", "request")) | (Q - K < 64)),  # noqa: SIM300
         "kv_pos <= q_pos & (kv_pos < prefix_len[request] | q_pos - kv_pos < 64)"),
        (~(K <= Q) | (mask.kv_len() - K < mask.q_len()), "~(kv_pos <= q_pos) | kv_len - kv_pos < q_len"),
        (mask.operand("a", "query") == mask.operand("b", "key"), "a[query] == b[key]"),
        (mask.operand("a", "query") == mask.operand("a", "new_key"), "a[query] == a[new_key]"),
        (mask.causal() & mask.window(127, 0), "causal & window(127, 0)"),
        (mask.everything(), "true"),
        (mask.nothing(), "false"),
    ],
)  # fmt: skip
def test_operators_build_what_the_text_says(built, text):
    parsed = qkv.parse_mask(text)
    assert built.text() == parsed.text() == str(built)
    assert built.hash() == parsed.hash()
    assert built == parsed and hash(built) == hash(parsed)
    assert qkv.parse_mask(built.text()).text() == built.text()


def truth(expression, q_len, kv_len, **keywords):
    scene = qkv.MaskScene(q_len, kv_len, **keywords)
    return np.array([[qkv.is_visible(expression, scene, i, j) for j in range(kv_len)] for i in range(q_len)])


def positions(q_len, kv_len):
    return np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len)[None]


@pytest.mark.parametrize(
    ("built_in", "definition"),
    [
        (mask.everything(), lambda q, k: (q >= 0) | (k >= 0)),
        (mask.nothing(), lambda q, k: (q < 0) & (k < 0)),
        (mask.causal(), lambda q, k: k <= q),
        (mask.window(2, 1), lambda q, k: (q - k <= 2) & (k - q <= 1)),
        (mask.window(-1, 0), lambda q, k: k <= q),
        (mask.sliding_window(3), lambda q, k: (k <= q) & (q - k < 3)),
        (mask.sliding_window(3, bidirectional=True), lambda q, k: abs(q - k) < 3),
    ],
)
def test_built_ins_are_their_definitions(built_in, definition):
    np.testing.assert_array_equal(truth(built_in, 5, 8), definition(*positions(5, 8)))


def test_prefix_lm_operands_make_a_span_bidirectional():
    starts, lengths = np.array([0, 3, 9], np.int32), np.array([3, 8], np.int32)
    operands = qkv.fill_prefix_lm_spans([(1, 3, 5)], starts, lengths)
    assert operands["span_start"].tolist() == [-1] * 3 + [-1, 3, 3, 3, -1, -1]
    q, k = positions(6, 8)
    seen = truth(mask.prefix_lm(), 6, 8, request=1, query_start=3, operands=operands)
    np.testing.assert_array_equal(seen, (k <= q) | ((q >= 3) & (q <= 5) & (k >= 3) & (k <= 5)))


def test_tree_operands_show_a_node_its_ancestors_only():
    operands = qkv.fill_tree([-1, 0, 0, 1], np.array([0, 4], np.int32))
    seen = truth(mask.tree(), 4, 6, operands=operands)
    assert seen[:, :2].all()  # the context
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    np.testing.assert_array_equal(seen[:, 2:], np.array(expected, bool))


def test_per_request_operands_are_looked_up_by_request():
    operands = {"causal": np.array([1, 0], np.int32)}
    q, k = positions(3, 4)
    np.testing.assert_array_equal(truth(mask.per_request_causal(), 3, 4, request=0, operands=operands), k <= q)
    assert truth(mask.per_request_causal(), 3, 4, request=1, operands=operands).all()
    assert qkv.operands_of(mask.per_request_causal()) == [("causal", "request")]


def test_tiles_are_classified():
    scene = qkv.MaskScene(q_len=8, kv_len=8)
    assert qkv.classify_tile("causal", scene, 0, 4, 4, 8) == "empty"
    assert qkv.classify_tile("causal", scene, 4, 8, 0, 4) == "full"
    assert qkv.classify_tile("causal", scene, 0, 4, 0, 4) == "partial"


def test_pictures_show_every_pair(tmp_path):
    scene = qkv.MaskScene(q_len=3, kv_len=4)
    assert qkv.draw_mask_text("causal", scene).split() == ["##..", "###.", "####"]
    path = tmp_path / "mask.png"
    qkv.draw_mask_png(mask.causal(), scene, str(path), tile_q=2, tile_kv=2)
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and width >= 4 and height >= 3
    at = data.index(b"IDAT")
    assert len(set(zlib.decompress(data[at + 4 : at + 4 + struct.unpack(">I", data[at - 4 : at])[0]]))) > 1


def test_a_mask_has_no_truth_value():
    with pytest.raises(TypeError, match="&"):
        bool(K <= Q)
    with pytest.raises(TypeError, match="&"):
        _ = 0 <= K <= Q


def test_text_that_is_no_mask_is_refused_with_its_position():
    with pytest.raises(qkv.Error) as caught:
        qkv.parse_mask("kv_pos <= ")
    assert caught.value.code == "invalid_argument" and caught.value.allowed


def test_operators_refuse_other_types():
    with pytest.raises(TypeError):
        _ = Q + "1"
    with pytest.raises(TypeError):
        _ = (K <= Q) & 1
    assert (K <= Q) != "kv_pos <= q_pos"
