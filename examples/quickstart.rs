//! quickstart.cpp in Rust, over the C interface: one decode step of two requests over a paged cache.
//! docs/c_api.md says how qkv.rs is made and what to link.
#![allow(non_camel_case_types, non_upper_case_globals, dead_code)]

use std::{ffi::CStr, mem::size_of, os::raw::c_void, ptr};

include!(concat!(env!("QKV_BINDINGS"), "/qkv.rs"));

/// A view of a slice, which must live as long as the view is used. Mutable: the library may write through it.
fn view<T>(data: &mut [T], dtype: u32, shape: &[i64]) -> qkv_tensor {
    assert_eq!(data.len() as i64, shape.iter().product::<i64>());
    let data = data.as_mut_ptr() as *const c_void;
    unsafe { qkv_tensor_contiguous(data, dtype as qkv_dtype, shape.len() as i32, shape.as_ptr()) }
}

fn check(status: qkv_status) -> Result<(), String> {
    if status == QKV_OK as qkv_status {
        return Ok(());
    }
    Err(unsafe { CStr::from_ptr(qkv_last_error_message()) }
        .to_string_lossy()
        .into_owned())
}

struct Attention(*mut qkv_attention);

impl Drop for Attention {
    fn drop(&mut self) {
        unsafe { qkv_attention_destroy(self.0) }
    }
}

struct Plan(*mut qkv_plan);

impl Drop for Plan {
    fn drop(&mut self) {
        unsafe { qkv_plan_destroy(self.0) }
    }
}

fn main() -> Result<(), String> {
    let spec = qkv_layer_spec {
        struct_size: size_of::<qkv_layer_spec>() as _,
        num_q_heads: 8,
        num_kv_heads: 2,
        head_dim: 64,
        has_cache: 1,
        page_size: 16,
        ..unsafe { std::mem::zeroed() }
    };
    let mut attention = Attention(ptr::null_mut()); // once a layer
    let cpu = qkv_device {
        kind: QKV_CPU as _,
        index: 0,
    };
    check(unsafe { qkv_attention_create(&spec, cpu, &mut attention.0) })?;

    let (mut query_start_loc, mut seq_lens, mut block_table) = ([0, 1, 2], [5, 20], [3, -1, 0, 2]);
    let mut slot_mapping = [3 * 16 + 4, 2 * 16 + 3_i64]; // token 4 of request 0 and token 19 of request 1
    let batch = qkv_batch {
        struct_size: size_of::<qkv_batch>() as _,
        query_start_loc: view::<i32>(&mut query_start_loc, QKV_I32, &[3]),
        seq_lens: view::<i32>(&mut seq_lens, QKV_I32, &[2]),
        block_table: view::<i32>(&mut block_table, QKV_I32, &[2, 2]),
        slot_mapping: view(&mut slot_mapping, QKV_I64, &[2]),
        ..unsafe { std::mem::zeroed() }
    };
    let (no_tensor, no_stream) = (ptr::null(), ptr::null_mut());
    let mut plan = Plan(ptr::null_mut()); // once a step
    check(unsafe { qkv_attention_plan(attention.0, &batch, &mut plan.0, no_stream) })?;

    let mut pages = vec![0.3_f32; 4 * 2 * 16 * 128]; // [page][KV head][token][key | value]
    let (mut query, mut key, mut value) = (
        [0.1_f32; 2 * 8 * 64],
        [0.2_f32; 2 * 2 * 64],
        [0.8_f32; 2 * 2 * 64],
    );
    let mut out = vec![0.0_f32; 2 * 8 * 64];
    let mut cache: qkv_kv_cache = unsafe { std::mem::zeroed() };
    let pages_view = view(&mut pages, QKV_F32, &[4, 2, 16, 128]);
    check(unsafe { qkv_kv_cache_from_interleaved(&pages_view, 64, &mut cache) })?;
    let (key_view, value_view) = (
        view(&mut key, QKV_F32, &[2, 2, 64]),
        view(&mut value, QKV_F32, &[2, 2, 64]),
    );
    check(unsafe {
        qkv_attention_update_cache(
            attention.0,
            &key_view,
            &value_view,
            &cache,
            plan.0,
            no_stream,
        )
    })?;
    let (query_view, out_view) = (
        view(&mut query, QKV_F32, &[2, 8, 64]),
        view(&mut out, QKV_F32, &[2, 8, 64]),
    );
    check(unsafe {
        qkv_attention_forward(
            attention.0,
            &query_view,
            &cache,
            plan.0,
            &out_view,
            no_tensor,
            no_tensor,
            no_tensor,
            no_stream,
        )
    })?;
    println!("request 0: {:.3}, request 1: {:.3}", out[0], out[8 * 64]);
    Ok(())
}
