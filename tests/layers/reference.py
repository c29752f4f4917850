"""The layers in plain PyTorch, one token at a time, in the dtype of their parameters."""

import math

import torch
import torch.nn.functional as F

from fla_npu.layers import (
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedLinearAttention,
    MultiScaleRetention,
    SimpleGatedLinearAttention,
)
from fla_npu.ops.common.recurrence import delta_recurrence

ACTIVATIONS = {
    "elu": lambda x: F.elu(x) + 1,
    "relu2": lambda x: F.relu(x) ** 2,
    "silu": lambda x: x * torch.sigmoid(x),
    "swish": lambda x: x * torch.sigmoid(x),
    "sigmoid": torch.sigmoid,
    "gelu": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "exact gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "identity": lambda x: x,
}


def forward(layer, x, **options):
    """`layer(x)` for one unpadded batch `[B, T, hidden]`, from the parameters alone; for the layers without a gated
    delta rule also from the constructor's options."""
    if isinstance(layer, DeltaNet):
        return _delta_net(layer, x, options)
    if isinstance(layer, GatedLinearAttention | SimpleGatedLinearAttention | MultiScaleRetention):
        return _grouped(layer, x, options)
    return _gated_delta_rule(layer, x)


def _gated_delta_rule(layer, x):
    B, T = x.shape[:2]
    H, HV, K, V = layer.num_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    R, n = HV // H, getattr(layer, "num_householder", 1)
    two = isinstance(layer, GatedDeltaNet2)
    per_head = isinstance(layer, GatedDeltaNet | GatedDeltaProduct)

    q, k, v = (_mixed(layer, name, x) for name in "qkv")
    q = q.view(B, T, H, K).repeat_interleave(R, dim=2)
    k = k.view(B, T, n, H, K).repeat_interleave(R, dim=3)
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    v = v.view(B, T, n, HV, V)
    b = torch.sigmoid(x @ layer.b_proj.weight.T) * (2 if layer.allow_neg_eigval else 1)
    if two:
        b = b.view(B, T, 1, H, K).repeat_interleave(R, dim=3)
        w = torch.sigmoid(x @ layer.w_proj.weight.T).view(v.shape)
    else:
        b = w = b.view(B, T, n, HV, 1)
    if not getattr(layer, "use_forget_gate", True):
        decay = x.new_ones(B, T, 1, 1, 1)
    elif per_head:
        g = -layer.A_log.exp() * F.softplus(x @ layer.a_proj.weight.T + layer.dt_bias)
        decay = g.exp()[..., None, None]
    else:
        logits = (x @ layer.f_proj[0].weight.T @ layer.f_proj[1].weight.T + layer.dt_bias).view(B, T, -1, K)
        A = layer.A_log.exp()[:, None]
        if two:
            g = (-A * F.softplus(logits)).repeat_interleave(R, dim=2)
        elif layer.lower_bound is None:
            g = -A * F.softplus(logits)
        else:
            g = layer.lower_bound * torch.sigmoid(A * logits)
        decay = g.exp()[..., None]

    S, outputs = x.new_zeros(B, HV, K, V), []
    for t in range(T):
        S = decay[:, t] * S
        for i in range(n):
            u = w[:, t, i] * v[:, t, i] - torch.einsum("bhkv,bhk->bhv", S, b[:, t, i] * k[:, t, i])
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t, i], u)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * K**-0.5)
    o = torch.stack(outputs, 1)

    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + layer.o_norm.eps) * layer.o_norm.weight
    if not per_head:
        gate = x @ layer.g_proj[0].weight.T @ layer.g_proj[1].weight.T + layer.g_proj[1].bias
        o = o * torch.sigmoid(gate.view_as(o))
    elif hasattr(layer, "g_proj"):
        gate = (x @ layer.g_proj.weight.T).view_as(o)
        o = o * (torch.sigmoid(gate) if layer.o_norm.activation == "sigmoid" else F.silu(gate))
    return o.flatten(2) @ layer.o_proj.weight.T


def _delta_net(layer, x, options):
    H, V = layer.num_heads, layer.value_dim // layer.num_heads
    activation = ACTIVATIONS[options.get("qk_activation", "silu")]
    q, k, v = (_mixed(layer, name, x, activation if name != "v" else F.silu).unflatten(-1, (H, -1)) for name in "qkv")
    if options.get("qk_norm") == "sum":
        q, k = (t / t.sum(-1, keepdim=True) for t in (q, k))  # of positive numbers
    else:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    beta = torch.sigmoid(x @ layer.b_proj.weight.T) if hasattr(layer, "b_proj") else x.new_ones(*x.shape[:2], H)
    beta = beta * (2 if options.get("allow_neg_eigval") else 1)
    o, _ = delta_recurrence(q, k, v, beta=beta, dtype=x.dtype)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight
    if hasattr(layer, "g_proj"):
        o = o * F.silu((x @ layer.g_proj.weight.T).unflatten(-1, (H, V)))
    return o.flatten(2) @ layer.o_proj.weight.T


def _grouped(layer, x, options):
    H, G = layer.num_heads, options.get("num_kv_heads", layer.num_heads)
    K, V = layer.key_dim // H, layer.value_dim // H
    activation = ACTIVATIONS["silu" if hasattr(layer, "q_conv1d") else "identity"]
    q, k, v = (_mixed(layer, name, x, activation) for name in "qkv")
    q, k, v = (t.unflatten(-1, (-1, width)) for t, width in ((q, K), (k, K), (v, V)))
    q, k = (ACTIVATIONS[options.get("feature_map", "identity")](t) for t in (q, k))
    decays = {}
    if isinstance(layer, GatedLinearAttention):
        (low,), (weight, bias) = layer.gk_proj[0].parameters(), layer.gk_proj[1].parameters()
        g = F.logsigmoid(x @ low.T @ weight.T + bias) / options.get("gate_logit_normalizer", 16)
        g = g.clamp(min=options.get("clamp_min", -math.inf)).unflatten(-1, (G, K))
        decays["gk"] = g.repeat_interleave(H // G, dim=2)
    elif isinstance(layer, SimpleGatedLinearAttention):
        g = F.logsigmoid(x @ layer.gk_proj.weight.T + layer.gk_proj.bias)
        decays["g"] = g / options.get("gate_logit_normalizer", 16)
    else:
        rates = torch.tensor([math.log(1 - 2.0 ** (-5 - h)) for h in range(H)], dtype=x.dtype)
        decays["g"] = rates.expand(*x.shape[:2], H)
        q, k = _rotated(q), _rotated(k)
    k, v = (t.repeat_interleave(H // G, dim=2) for t in (k, v))
    o, _ = delta_recurrence(q, k, v, **decays, delta=False, dtype=x.dtype)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5)
    norm = getattr(layer, "g_norm_swish_gate", None) or layer.g_norm
    o = (o if norm.weight is None else o * norm.weight).flatten(2)
    if hasattr(layer, "g_proj"):
        name = options.get("gate_fn", "swish")
        exact = name == "gelu" and isinstance(layer, MultiScaleRetention)
        o = o * ACTIVATIONS["exact gelu" if exact else name](x @ layer.g_proj.weight.T)
    return o @ layer.o_proj.weight.T


def _rotated(x):
    """Channels i and i + K/2 of a token at position t as a complex number, times `exp(1j * t * 10000^(-2i/K))`."""
    T, K = x.shape[1], x.shape[-1]
    frequencies = 10000.0 ** (-torch.arange(K // 2, dtype=x.dtype) * 2 / K)
    turns = torch.polar(torch.ones((), dtype=x.dtype), torch.arange(T, dtype=x.dtype)[:, None] * frequencies)
    z = torch.complex(*x.chunk(2, dim=-1)) * turns[:, None]
    return torch.cat([z.real, z.imag], dim=-1)


def _mixed(layer, name, x, activation=F.silu):
    y = x @ getattr(layer, f"{name}_proj").weight.T
    if layer.use_short_conv:
        conv = getattr(layer, f"{name}_conv1d")
        W = layer.conv_size
        windows = F.pad(y, (0, 0, W - 1, 0)).unfold(1, W, 1)
        y = (windows * conv.weight[:, 0]).sum(-1)
        if conv.bias is not None:
            y = y + conv.bias
    return activation(y)
