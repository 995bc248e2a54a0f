"""Warm-up from Python: what is compiled, told and refused. No GPU is needed."""

import numpy as np
import pytest
import qkv


def gpu_layer(head_dim=32):
    return qkv.LayerSpec(
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        query_dtype="bf16",
        kv_dtype="bf16",
        cache=qkv.CacheSpec(page_size=16),
    )


needs_nvrtc = pytest.mark.skipif("libnvrtc: got" in qkv.info(), reason="needs NVRTC")


@needs_nvrtc
def test_each_kernel_is_told_and_a_second_warmup_compiles_nothing():
    told = []
    result = qkv.warmup([gpu_layer(), gpu_layer()], arch="sm_80", on_progress=lambda *news: told.append(news))
    assert [(done, total) for done, total, _ in told] == [(i + 1, 5) for i in range(5)]
    assert {kernel.name for _, _, kernel in told} == {kernel.name for kernel in result.kernels}
    assert [kernel.error for kernel in result.kernels] == [""] * 5
    assert result.skipped == []
    before = qkv.num_compiles()
    assert not any(kernel.compiled for kernel in qkv.warmup([gpu_layer()], arch="sm_80").kernels)
    assert qkv.num_compiles() == before


@needs_nvrtc
def test_latent_layers_bring_their_gathers_and_merges():
    spec = qkv.MlaSpec(num_heads=2, qk_nope_head_dim=16, v_head_dim=16, kv_lora_rank=32)
    names = [kernel.name for kernel in qkv.warmup([spec], arch="sm_80").kernels]
    assert "gather sm_80" in names
    assert "merge_states sm_80" in names
    assert "cache_write sm_80" not in names
    more = [kernel.name for kernel in qkv.warmup([spec], arch="sm_80", cache_write=True).kernels]
    assert set(more) - set(names) == {"cache_write sm_80", "cache_quantise sm_80"}


@needs_nvrtc
def test_planners_have_kernels_of_their_own():
    names = {kernel.name for kernel in qkv.warmup([gpu_layer()], arch="sm_80").kernels}
    device = {kernel.name for kernel in qkv.warmup([gpu_layer()], arch="sm_80", planners="device").kernels}
    assert [name.split()[0] for name in device - names if name.startswith("plan_")] == ["plan_batch"]
    with pytest.raises(qkv.Error, match="none, host or device"):
        qkv.warmup([gpu_layer()], arch="sm_80", planners="some")


@needs_nvrtc
def test_bounds_leave_kernels_out():
    bounds = qkv.RequestBounds(max_query_len=1)
    assert (bounds.max_query_len, bounds.max_model_len) == (1, np.iinfo(np.int32).max)
    assert len(qkv.warmup([gpu_layer()], arch="sm_80", bounds=bounds).kernels) == 4


@needs_nvrtc
def test_what_the_callback_raises_ends_the_warmup():
    def stop(*news):
        raise KeyError(news)

    with pytest.raises(KeyError):
        qkv.warmup([gpu_layer()], arch="sm_80", on_progress=stop)


@needs_nvrtc
def test_layers_that_cannot_run_are_skipped():
    result = qkv.warmup([gpu_layer(36)], arch="sm_80")
    assert result.kernels == []
    assert "head_dim: got 36" in result.skipped[0]


def test_unknown_architecture_is_refused():
    with pytest.raises(qkv.Error, match="sm_90a"):
        qkv.warmup([gpu_layer()], arch="sm_50")


def test_layer_on_the_cpu_has_nothing_to_warm_up():
    before = qkv.num_compiles()
    spec = qkv.LayerSpec(num_q_heads=4, num_kv_heads=2, head_dim=32)
    qkv.Attention(spec, warm_up=qkv.RequestBounds(max_model_len=100))
    assert qkv.num_compiles() == before


@needs_nvrtc
def test_layers_of_one_rank_warm_the_others():
    spec = qkv.LayerSpec(
        num_q_heads=4, num_kv_heads=2, head_dim=32, query_dtype="bf16", kv_dtype="bf16", cache=qkv.CacheSpec()
    )
    first = qkv.warmup(qkv.rank_layers(spec, 0, 2), arch="sm_80")
    assert any("keys context ranks 2" in kernel.name for kernel in first.kernels)
    before = qkv.num_compiles()
    second = qkv.warmup(qkv.rank_layers(spec, 1, 2), arch="sm_80")
    assert [kernel.name for kernel in second.kernels] == [kernel.name for kernel in first.kernels]
    assert qkv.num_compiles() == before


@needs_nvrtc
def test_latent_layers_over_ranks_are_warmed_by_their_layers():
    spec = qkv.MlaSpec(num_heads=2, qk_nope_head_dim=16, v_head_dim=16, kv_lora_rank=32)
    layers = qkv.rank_layers(spec, 1, 2, interleave_size=4)
    assert [layer.num_kv_heads for layer in layers] == [1, 2]
    names = [kernel.name for kernel in qkv.warmup(layers, arch="sm_80").kernels]
    assert any("ranks 2 by 4" in name for name in names)
    assert {"gather sm_80", "merge_states sm_80"} <= set(names)
