"""Where FLA 0.6.0 keeps what belongs to the delta-rule family: the same import works here.

Checked by hand against the installed FLA, which has every name of the table. Not in it: ops, layers and models of other
families (RWKV, HGRN, sparse attention, ...), classes of the autograd Functions, launchers and helpers of FLA's Triton
kernels (of steps between kernels there are the modules: `tests/ops/test_fla_internals.py`), and what splits sequences
over processes.
"""

import importlib

import pytest

import fla_npu

CONVOLUTION = " ".join(
    ["ShortConvolution", "causal_conv1d", *(f"causal_conv1d_{x}" for x in ("fwd", "bwd", "update", "update_states"))]
)
PATHS = {
    "ops": (
        "chunk_gated_delta_rule chunk_gdn fused_recurrent_gated_delta_rule fused_recurrent_gdn chunk_kda "
        "fused_recurrent_kda chunk_delta_rule fused_chunk_delta_rule fused_recurrent_delta_rule chunk_gla "
        "fused_chunk_gla fused_recurrent_gla chunk_simple_gla fused_chunk_simple_gla "
        "fused_recurrent_simple_gla parallel_simple_gla chunk_retention fused_chunk_retention "
        "fused_recurrent_retention parallel_retention"
    ),
    "ops.gated_delta_rule": (
        "chunk_gated_delta_rule chunk_gdn fused_recurrent_gated_delta_rule fused_recurrent_gdn "
        "naive_chunk_gated_delta_rule naive_recurrent_gated_delta_rule"
    ),
    "ops.gated_delta_rule.chunk": "chunk_gated_delta_rule",
    "ops.gated_delta_rule.fused_recurrent": "fused_recurrent_gated_delta_rule fused_recurrent_gated_delta_rule_fwd",
    "ops.gated_delta_rule.naive": "naive_chunk_gated_delta_rule naive_recurrent_gated_delta_rule",
    "ops.gated_delta_rule.gate": "naive_gdn_gate fused_gdn_gate gdn_gate_fwd gdn_gate_bwd gdn_gate_chunk_cumsum",
    "ops.kda": "chunk_kda fused_recurrent_kda",
    "ops.kda.chunk": "chunk_kda",
    "ops.kda.fused_recurrent": "fused_recurrent_kda fused_recurrent_kda_fwd",
    "ops.kda.naive": "naive_recurrent_kda naive_chunk_kda",
    "ops.kda.gate": (
        "naive_kda_gate naive_kda_lowerbound_gate fused_kda_gate kda_gate_fwd kda_gate_bwd kda_gate_chunk_cumsum"
    ),
    "ops.gdn2": "chunk_gdn2 fused_recurrent_gdn2 naive_chunk_gdn2 naive_recurrent_gdn2",
    "ops.gated_delta_product": "chunk_gated_delta_product",
    "ops.gated_delta_product.naive": "naive_recurrent_gated_delta_product",
    "ops.delta_rule": "chunk_delta_rule fused_chunk_delta_rule fused_recurrent_delta_rule",
    "ops.delta_rule.chunk": "chunk_delta_rule",
    "ops.delta_rule.fused_chunk": "fused_chunk_delta_rule",
    "ops.delta_rule.fused_recurrent": "fused_recurrent_delta_rule",
    "ops.delta_rule.naive": "delta_rule_recurrence delta_rule_chunkwise delta_rule_parallel",
    "ops.gla": "chunk_gla fused_chunk_gla fused_recurrent_gla",
    "ops.gla.chunk": "chunk_gla",
    "ops.gla.fused_chunk": "fused_chunk_gla",
    "ops.gla.fused_recurrent": "fused_recurrent_gla",
    "ops.gla.naive": "naive_recurrent_gla",
    "ops.simple_gla": "chunk_simple_gla fused_chunk_simple_gla fused_recurrent_simple_gla parallel_simple_gla",
    "ops.simple_gla.chunk": "chunk_simple_gla",
    "ops.simple_gla.fused_chunk": "fused_chunk_simple_gla",
    "ops.simple_gla.fused_recurrent": "fused_recurrent_simple_gla",
    "ops.simple_gla.parallel": "parallel_simple_gla",
    "ops.simple_gla.naive": "naive_recurrent_simple_gla naive_chunk_simple_gla naive_parallel_simple_gla",
    "ops.retention": "chunk_retention fused_chunk_retention fused_recurrent_retention parallel_retention",
    "ops.retention.chunk": "chunk_retention",
    "ops.retention.fused_chunk": "fused_chunk_retention",
    "ops.retention.fused_recurrent": "fused_recurrent_retention",
    "ops.retention.parallel": "parallel_retention",
    "ops.retention.naive": "naive_retention",
    "ops.common.gate": "fused_beta_sigmoid fused_beta_sigmoid_fwd fused_beta_sigmoid_bwd",
    "ops.utils": (
        "prepare_lens prepare_lens_from_mask prepare_cu_seqlens_from_lens prepare_cu_seqlens_from_mask "
        "prepare_position_ids prepare_sequence_ids prepare_token_indices prepare_chunk_indices "
        "prepare_chunk_offsets prepare_chunk_indices_static get_max_num_splits pack_sequence "
        "unpack_sequence chunk_local_cumsum chunk_global_cumsum solve_tril mean_pooling matmul addmm "
        "softmax_fwd softmax_bwd logsumexp_fwd softplus sinkhorn chunk_local_cumsum_scalar "
        "chunk_local_cumsum_vector chunk_global_cumsum_scalar chunk_global_cumsum_vector"
    ),
    "ops.utils.index": (
        "prepare_lens prepare_chunk_indices prepare_cu_seqlens_from_mask prepare_lens_from_mask "
        "prepare_chunk_offsets prepare_position_ids prepare_sequence_ids prepare_token_indices "
        "prepare_cu_seqlens_from_lens"
    ),
    "ops.utils.cumsum": "chunk_local_cumsum chunk_global_cumsum",
    "ops.utils.pack": "pack_sequence unpack_sequence",
    "ops.utils.solve_tril": "solve_tril",
    "ops.utils.pooling": "mean_pooling",
    "ops.utils.softmax": "softmax_fwd softmax_bwd",
    "ops.utils.logsumexp": "logsumexp_fwd",
    "ops.utils.matmul": "matmul addmm",
    "ops.utils.constant": "RCP_LN2",
    "ops.utils.softplus": "softplus softplus2",
    "ops.utils.sinkhorn": "sinkhorn naive_sinkhorn",
    "ops.utils.sinkhorn.naive": "naive_sinkhorn",
    "ops.utils.sinkhorn.ops": "sinkhorn",
    "ops.cp": (
        "FLACPContext build_cp_context all_gather_into_tensor all_reduce_sum conv_cp_send_recv_bwd "
        "conv_cp_send_recv_fwd send_recv_bwd send_recv_fwd"
    ),
    "ops.cp.context": "FLACPContext build_cp_context",
    "ops.cp.comm": "all_gather_into_tensor all_reduce_sum send_recv_fwd send_recv_bwd",
    "modules": (
        "ShortConvolution RMSNorm LayerNorm GroupNorm L2Norm RMSNormLinear LayerNormLinear "
        "GroupNormLinear FusedRMSNormGated FusedLayerNormGated FusedRMSNormSwishGate "
        "FusedLayerNormSwishGate FusedRMSNormSwishGateLinear FusedLayerNormSwishGateLinear GatedMLP "
        "RotaryEmbedding FusedCrossEntropyLoss FusedKLDivLoss FusedLinearCrossEntropyLoss TokenShift "
        "LongConvolution ImplicitLongConvolution BitLinear FusedBitLinear"
    ),
    "modules.token_shift": "TokenShift token_shift",
    "modules.long_conv": "LongConvolution ImplicitLongConvolution PositionalEmbedding fft_conv",
    "modules.conv.long_conv": "LongConvolution ImplicitLongConvolution PositionalEmbedding fft_conv",
    "modules.fused_bitlinear": (
        "BitLinear FusedBitLinear bit_linear activation_quant weight_quant rms_norm_linear_quant "
        "layer_norm_linear_quant layer_norm_linear_quant_fn"
    ),
    "modules.l2norm": "l2norm l2_norm l2norm_fwd l2norm_bwd L2Norm",
    "modules.norm.l2norm": "l2norm l2_norm l2norm_fwd l2norm_bwd L2Norm",
    "modules.layernorm": (
        "RMSNorm LayerNorm GroupNorm RMSNormLinear LayerNormLinear GroupNormLinear rms_norm layer_norm "
        "group_norm rms_norm_linear layer_norm_linear group_norm_linear"
    ),
    "modules.norm.layernorm": "RMSNorm LayerNorm GroupNorm",
    "modules.layernorm_gated": "RMSNormGated LayerNormGated rmsnorm_fn layernorm_fn",
    "modules.fused_norm_gate": (
        "FusedRMSNormGated FusedLayerNormGated rms_norm_gated layer_norm_gated "
        "rms_norm_swish_gate_linear layer_norm_swish_gate_linear FusedRMSNormGatedLinear "
        "FusedLayerNormGatedLinear"
    ),
    "modules.norm": "RMSNorm LayerNorm GroupNorm L2Norm FusedRMSNormGated LayerNormGated RMSNormGated",
    "modules.activations": (
        "ACT2FN swish sigmoid swiglu sigmoidglu powglu swiglu_linear sigmoidglu_linear powglu_linear "
        "logsigmoid sqrelu elu_p1 fast_gelu_impl bias_gelu_impl"
    ),
    "modules.fused_cross_entropy": "FusedCrossEntropyLoss cross_entropy_loss",
    "modules.fused_linear_cross_entropy": "FusedLinearCrossEntropyLoss fused_linear_cross_entropy_loss",
    "modules.fused_kl_div": "FusedKLDivLoss fused_kl_div_loss",
    "modules.rotary": "RotaryEmbedding rotary_embedding",
    "modules.l2warp": "l2_warp",
    "modules.mlp": "GatedMLP SwiGLULinear",
    "layers": (
        "Attention GatedDeltaNet KimiDeltaAttention GatedDeltaNet2 GatedDeltaProduct DeltaNet GatedLinearAttention "
        "MultiScaleRetention Mamba2"
    ),
    "layers.delta_net": "DeltaNet",
    "layers.gla": "GatedLinearAttention",
    "layers.simple_gla": "SimpleGatedLinearAttention",
    "layers.multiscale_retention": "MultiScaleRetention",
    "layers.mamba2": "Mamba2",
    "layers.gated_deltanet": "GatedDeltaNet",
    "layers.kda": "KimiDeltaAttention",
    "layers.attn": "Attention",
    "layers.gdn2": "GatedDeltaNet2",
    "layers.gated_deltaproduct": "GatedDeltaProduct",
    "layers.utils": (
        "get_unpad_data index_first_axis index_put_first_axis pad_input unpad_input unpad_hidden_states "
        "repad_hidden_states get_layer_cache update_layer_cache require_cache_layer_idx"
    ),
    "models": " ".join(
        f"{family}{kind}"
        for family in ("GatedDeltaNet", "KDA", "DeltaNet", "GLA", "RetNet", "Mamba2", "GatedDeltaProduct")
        for kind in ("Config", "Model", "ForCausalLM")
    ),
    "models.delta_net": "DeltaNetConfig DeltaNetModel DeltaNetForCausalLM",
    "models.delta_net.configuration_delta_net": "DeltaNetConfig",
    "models.delta_net.modeling_delta_net": "DeltaNetModel DeltaNetBlock DeltaNetPreTrainedModel DeltaNetForCausalLM",
    "models.gla": "GLAConfig GLAModel GLAForCausalLM",
    "models.gla.configuration_gla": "GLAConfig",
    "models.gla.modeling_gla": "GLAModel GLABlock GLAPreTrainedModel GLAForCausalLM",
    "models.retnet": "RetNetConfig RetNetModel RetNetForCausalLM",
    "models.retnet.configuration_retnet": "RetNetConfig",
    "models.retnet.modeling_retnet": "RetNetModel RetNetBlock RetNetPreTrainedModel RetNetForCausalLM",
    "models.mamba2": "Mamba2Config Mamba2Model Mamba2ForCausalLM",
    "models.mamba2.configuration_mamba2": "Mamba2Config",
    "models.mamba2.modeling_mamba2": "Mamba2Model Mamba2Block Mamba2PreTrainedModel Mamba2ForCausalLM",
    "models.gated_deltaproduct": "GatedDeltaProductConfig GatedDeltaProductModel GatedDeltaProductForCausalLM",
    "models.gated_deltaproduct.configuration_gated_deltaproduct": "GatedDeltaProductConfig",
    "models.gated_deltaproduct.modeling_gated_deltaproduct": (
        "GatedDeltaProductModel GatedDeltaProductBlock GatedDeltaProductPreTrainedModel GatedDeltaProductForCausalLM"
    ),
    "models.gated_deltanet": "GatedDeltaNetConfig GatedDeltaNetModel GatedDeltaNetForCausalLM",
    "models.kda": "KDAConfig KDAModel KDAForCausalLM",
    "models.gated_deltanet.modeling_gated_deltanet": (
        "GatedDeltaNetModel GatedDeltaNetBlock GatedDeltaNetPreTrainedModel GatedDeltaNetForCausalLM"
    ),
    "models.kda.modeling_kda": "KDAModel KDABlock KDAPreTrainedModel KDAForCausalLM",
    "models.gated_deltanet.configuration_gated_deltanet": "GatedDeltaNetConfig",
    "models.kda.configuration_kda": "KDAConfig",
    "models.utils": "Cache FLACache FLALayer LegacyFLACache FLAGenerationMixin",
    "models.cache_utils": "Cache FLACache FLALayer LegacyFLACache",
    "models.generation_utils": "FLAGenerationMixin FLAUnsupportedCacheGenerationMixin",
    "models.configuration_utils": "parse_attention_config get_attention_spec AttentionConfig",
    "models.modeling_utils": "get_attention FLAPreTrainedModel FLAModel FLAForCausalLM",
    "utils": (
        "device device_platform device_name device_torch_lib IS_NPU IS_NVIDIA IS_AMD IS_INTEL "
        "assert_close get_err_ratio get_abs_err input_guard contiguous tensor_cache autocast_custom_fwd "
        "autocast_custom_bwd deprecate_kwarg checkpoint check_shared_mem get_all_max_shared_mem "
        "get_device_smem_optin get_device_capability get_device_arch get_multiprocessor_count "
        "get_available_device map_triton_backend_to_torch_device custom_device_ctx Backend "
        "check_pytorch_version check_transformers_version find_spec_cached FLA_CI_ENV IS_ARM "
        "IS_AMD_TMA_ARCH IS_GATHER_SUPPORTED IS_INTEL_ALCHEMIST IS_NVIDIA_BLACKWELL IS_NVIDIA_HOPPER "
        "IS_NVIDIA_SM100 IS_NVIDIA_SM120 IS_TF32_SUPPORTED IS_TMA_SUPPORTED is_npu is_nvidia is_amd "
        "is_intel is_arm is_amd_tma_arch is_gather_supported is_intel_alchemist is_nvidia_blackwell "
        "is_nvidia_hopper is_nvidia_sm100 is_nvidia_sm120 is_tf32_supported is_tma_supported"
    ),
    "backends": "BackendRegistry BaseBackend dispatch register",
} | dict.fromkeys(
    (
        "modules.causal_conv1d",
        "modules.causal_conv1d.ops",
        "modules.conv",
        "modules.conv.causal_conv1d",
        "modules.conv.short_conv",
        "modules.conv.triton",
        "modules.conv.triton.ops",
        "modules.convolution",
    ),
    CONVOLUTION,
)


@pytest.mark.parametrize("path", PATHS)
def test_path(path):
    module = importlib.import_module(f"fla_npu.{path}")
    missing = [name for name in PATHS[path].split() if not hasattr(module, name)]
    assert not missing


@pytest.mark.parametrize("package", ["backends", "ops.cp", "ops.utils", "modules", "modules.norm", "models"])
def test_exports_are_sorted_and_there(package):
    module = importlib.import_module(f"fla_npu.{package}")
    assert list(module.__all__) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_one_name_is_one_object():
    from fla_npu import models, modules
    from fla_npu.models import utils
    from fla_npu.models.cache_utils import Cache
    from fla_npu.modules import fused_cross_entropy, layernorm, rotary

    assert utils.Cache is Cache
    assert layernorm.LayerNorm is modules.LayerNorm is modules.norm.LayerNorm
    assert rotary.RotaryEmbedding is modules.RotaryEmbedding
    assert fused_cross_entropy.FusedCrossEntropyLoss is modules.FusedCrossEntropyLoss
    assert models.gated_deltanet.GatedDeltaNetModel is models.GatedDeltaNetModel
    assert fla_npu.chunk_kda is fla_npu.ops.kda.chunk.chunk_kda
