"""One compiled graph of each operator serves any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.calls import CALLS, Call

pytestmark = pytest.mark.usefixtures("fresh_compiler")

#: The batches are so many times that of the call. A batch of one has graphs of its own.
TIMES = (2, 5, 3)

#: The arguments that have the batch, by function; in their first dimension, or in the one behind the colon.
BATCH = {
    "add_bias_act": "x",
    "add_qkv_bias_rebuild_padding": "q k v padding_offset batch",
    "apply_penalties": "logits output_ids sequence_length min_length prompt_mask output_mask",
    "beam_search_step": "log_probs scores finished_scores finished_lengths finished_ids finished_parents done",
    "beam_topk": "log_probs",
    "bias_gelu": "x",
    "biased_grouped_topk": "gating_output",
    "build_sequence_length_padding_offset": "sequence_length valid_word_num",
    "chain_speculative_sampling": "draft_probs draft_token_ids target_probs seed offset",
    "concat_and_cache_mla": "kv_c k_pe slot_mapping",
    "copy_blocks": "block_mapping",
    "cross_attention": "q key_memory value_memory memory_lengths",
    "decoding_init": "start_ids",
    "dequantize_mxfp4": "packed scale",
    "dequantize_nvfp4": "packed scale",
    "embedding_lookup": "word_ids",
    "embedding_lookup_sine_position_encoding": "word_ids",
    "flash_mla_with_kvcache": "q block_table cache_seqlens indices extra_indices_in_kvcache topk_length "
    "extra_topk_length",
    "fused_add_layer_norm": "input residual residual_out",
    "fused_add_rms_norm": "input residual",
    "fused_add_rms_norm_quant": "input residual",
    "fused_experts": "hidden_states topk_weights topk_ids",
    "fused_qk_norm_rope_and_cache": "query key value cos sin slot_mapping",
    "gather_cache": "dst block_table cu_seq_lens batch_size seq_starts",
    "gather_tree": "ids:1 parents:1 lengths",
    "gelu_and_mul": "x",
    "gelu_fast": "x",
    "gelu_new": "x",
    "gelu_quick": "x",
    "gelu_tanh_and_mul": "x",
    "get_mla_metadata": "cache_seqlens topk_length extra_topk_length",
    "grouped_topk": "hidden_states gating_output",
    "layer_norm": "input",
    "masked_attention": "q k v key_cache:1 value_cache:1",
    "merge_attention_states": "out_a lse_a out_b lse_b",
    "min_p_sampling_from_probs": "probs min_p seed offset",
    "moe_activation": "x",
    "moe_align_block_size": "topk_ids",
    "moe_fused_gate": "input",
    "moe_gemm": "a expert_offsets a_scale row_token",
    "moe_gemm_batched": "a:1 expert_num_tokens",
    "moe_permute": "hidden_states a1q_scale topk_ids",
    "moe_sort": "topk_ids",
    "moe_sort_batched": "topk_ids",
    "moe_sum": "input",
    "moe_unpermute": "out permuted_hidden_states topk_weights inv_permuted_idx",
    "mul_and_silu": "x",
    "paged_attention": "query block_tables seq_lens",
    "paged_attention_v1": "out query block_tables seq_lens",
    "paged_attention_v2": "out exp_sums max_logits tmp_out query block_tables seq_lens",
    "per_token_group_quant_fp8": "x",
    "per_token_group_quant_int8": "x",
    "permute_rows": "hidden_states inverse",
    "prepare_weights": "b b_scale",
    "quantize_mxfp4": "x",
    "rebuild_sequence_length_padding": "src padding_offset batch",
    "relu2_and_mul": "x",
    "remove_sequence_length_padding": "src padding_offset",
    "reshape_and_cache": "key value slot_mapping",
    "reshape_and_cache_flash": "key value slot_mapping",
    "restore_weights": "prepared",
    "rms_norm": "input",
    "rms_norm_quant": "input",
    "rotary_embedding": "query key cos sin",
    "sample": "logits seed offset finished sequence_length top_k",
    "sampling_from_logits": "logits seed offset indices",
    "sampling_from_probs": "probs seed offset",
    "scaled_fp4_quant": "input",
    "scaled_fp8_quant": "input",
    "scaled_int8_quant": "input",
    "silu_and_mul": "x",
    "silu_and_mul_quant": "x",
    "softmax": "logits",
    "stop_words_criterion": "output_ids sequence_length finished",
    "swigluoai_and_mul": "x",
    "top_k_mask_logits": "logits top_k",
    "top_k_renorm_probs": "probs top_k",
    "top_k_sampling_from_probs": "probs top_k seed offset",
    "top_k_top_p_sampling_from_logits": "logits top_k seed offset",
    "top_k_top_p_sampling_from_probs": "probs top_k seed offset",
    "top_p_renorm_probs": "probs",
    "top_p_sampling_from_probs": "probs seed offset",
    "topk_sigmoid": "topk_weights topk_ids gating_output",
    "topk_softmax": "topk_weights topk_ids gating_output",
    "topp_init": "start_ids",
    "transpose_remove_padding": "src padding_offset",
    "update_finished": "word_ids finished sequence_length",
    "update_kv_cache": "key_cache:1 value_cache:1 parents",
    "update_logits": "logits finished",
    "varlen_attention": "q k v cu_seqlens_q cu_seqlens_k",
}
#: Their values in a batch so many times as large, where its copies may not have the same.
VALUES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    # Five words of three sequences of at most four.
    "padding_offset": lambda x, times: torch.cat([x + i * (3 * 4 - 5) for i in range(times)]),
    **dict.fromkeys(
        ("cu_seq_lens", "cu_seqlens_q", "cu_seqlens_k"),
        lambda x, times: torch.cat([x[:1], *(x[1:] + i * x[-1] for i in range(times))]),
    ),
    "inverse": lambda x, times: torch.cat([x + i * x.numel() for i in range(times)]),
    # No rows but those of an expert are written.
    "expert_offsets": lambda x, times: x * times,
    "expert_num_tokens": lambda x, times: x * times,
}
#: Calls that have no batch which can grow.
LEFT_OUT = {"moe_fused_gate no tokens": "has a batch of none", "moe_fused_gate strided rows": "grows by copies"}
KEYS = [key for key in CALLS if key not in LEFT_OUT]


def batch_dims(name: str) -> dict[str, int]:
    """The dimension that is the batch, by argument."""
    pairs = (word.partition(":") for word in BATCH[name].split())
    return {argument: int(dim or 0) for argument, _, dim in pairs}


def larger(call: Call, times: int) -> Call:
    """The call with its batch so many times."""
    dims = batch_dims(call.name)

    def grown(name: str, value: Any) -> Any:
        if name not in dims or value is None:
            return value
        if isinstance(value, int):
            return value * times
        if name in VALUES:
            return VALUES[name](value, times)
        return torch.cat([value] * times, dims[name]) if value.ndim else value

    given = {name: grown(name, value) for name, value in call.given.items()}
    return Call(call.name, tuple(given.values())[: len(call.args)], {name: given[name] for name in call.options})


def dynamic(call: Call, backend: Any) -> Callable[..., Any]:
    """The compiled function of a call, in whose graph the batch is a symbol, as are the numbers that grow with it."""
    dims = batch_dims(call.name)
    names = list(call.given)
    sizes = {name for name, value in call.given.items() if name in dims and type(value) is int}

    function, count = call.function, len(call.args)  # torch 2.10 traces no method of a named tuple

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(*values: Any) -> Any:
        values = [x.shape[0] if name in sizes else x for name, x in zip(names, values, strict=True)]
        options = dict(zip(names[count:], values[count:], strict=True))
        return function(*values[:count], **options)

    def marked(*args: Any, **options: Any) -> Any:
        values = []
        for name, value in zip(names, (*args, *options.values()), strict=True):
            if name in sizes:
                # A number is a constant of a graph, but a size is not.
                value = torch.empty(value, 0)
            if name in dims and value is not None and value.ndim:
                torch._dynamo.mark_dynamic(value, dims[name])
            values.append(value)
        return compiled(*values)

    return marked


def test_each_function_is_listed() -> None:
    assert {call.name for call in CALLS.values()} == {*BATCH}
    assert {CALLS[key].name for key in KEYS} == {*BATCH}
    for name in BATCH:
        assert {*batch_dims(name)} <= {a.name for a in Call(name, ()).operator()._schema.arguments}
    for call in CALLS.values():
        assert {*batch_dims(call.name)} & {*call.given}


@pytest.mark.parametrize("key", KEYS)
def test_one_graph_serves_any_batch(key: str, device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function = dynamic(CALLS[key], counter)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for times in TIMES:
            call = larger(CALLS[key], times).on(device)
            got, wanted = call.outcome(function), call.expected()
            assert len(got) == len(wanted) > 0
            for one, other in zip(got, wanted, strict=True):
                if isinstance(other, torch.Tensor):
                    assert one.shape == other.shape
                    assert torch.equal(one, other)
                else:
                    assert one == other
    assert counter.frame_count == 1
