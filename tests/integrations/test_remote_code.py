"""Models whose code comes with the checkpoint and imports FLA, as that of Kimi-Linear, Ling and AFM does.

The code below is this project's own; it uses the names and call forms of theirs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fla_npu
from fla_npu.integrations import imports
from fla_npu.ops.kda.gate import naive_kda_gate

pytestmark = pytest.mark.skipif(
    any(map(imports.installed_elsewhere, ("fla", "causal_conv1d"))), reason="fla or causal_conv1d is installed"
)

MODELING = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

try:
    from causal_conv1d import causal_conv1d_fn
    from fla.layers.utils import get_unpad_data, index_first_axis, pad_input
    from fla.modules import FusedRMSNormGated, ShortConvolution
    from fla.ops.kda import chunk_kda, fused_recurrent_kda
    from fla.ops.kda.gate import fused_kda_gate
except ImportError:
    raise ImportError("Please run `pip install -U fla-core`")


class RemoteConfig(PretrainedConfig):
    model_type = "remote_kda"
    hidden_size, heads, vocab_size, old_gate = 32, 2, 64, True


class RemoteKDA(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, self.heads, self.head_dim = config.hidden_size, config.heads, config.hidden_size // config.heads
        self.old_gate = config.old_gate
        self.q_proj, self.k_proj, self.v_proj, self.f_proj, self.g_proj, self.o_proj = (
            nn.Linear(size, size, bias=False) for _ in range(6)
        )
        self.b_proj = nn.Linear(size, self.heads, bias=False)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ShortConvolution(hidden_size=size, kernel_size=4, activation="silu") for _ in range(3)
        )
        self.A_log = nn.Parameter(torch.zeros(1, 1, self.heads, 1))
        self.dt_bias = nn.Parameter(torch.zeros(size))
        self.o_norm = FusedRMSNormGated(self.head_dim, eps=1e-5, activation="sigmoid")

    def forward(self, x, attention_mask=None):
        batch, length = x.shape[:2]
        bounds = None
        if attention_mask is not None:
            indices, bounds, _ = get_unpad_data(attention_mask[:, -length:])
            x = index_first_axis(x.flatten(0, 1), indices).unsqueeze(0)
        q, k, v = (
            conv(x=proj(x), cache=None, output_final_state=False, cu_seqlens=bounds)[0].unflatten(-1, (self.heads, -1))
            for proj, conv in (
                (self.q_proj, self.q_conv1d), (self.k_proj, self.k_conv1d), (self.v_proj, self.v_conv1d)
            )
        )
        g = self.f_proj(x)
        if self.old_gate:
            g = fused_kda_gate(g, self.A_log, self.head_dim, g_bias=self.dt_bias)
        else:
            g = fused_kda_gate(g.unflatten(-1, (self.heads, -1)), self.A_log, self.dt_bias)
        beta = self.b_proj(x).float().sigmoid()
        op = chunk_kda if self.training or length > 64 else fused_recurrent_kda
        o, _ = op(
            q=q, k=k, v=v, g=g, beta=beta, initial_state=None, output_final_state=True,
            use_qk_l2norm_in_kernel=True, cu_seqlens=bounds,
        )
        o = self.o_proj(self.o_norm(o, self.g_proj(x).unflatten(-1, (self.heads, -1))).flatten(-2))
        return o if bounds is None else pad_input(o.squeeze(0), indices, batch, length)


class RemoteModel(PreTrainedModel):
    config_class = RemoteConfig
    _tied_weights_keys = {}

    def __init__(self, config):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layer = RemoteKDA(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **kwargs):
        return CausalLMOutput(logits=self.lm_head(self.layer(self.embeddings(input_ids), attention_mask)))
"""

PROGRAM = """
import sys, torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM

folder, enabled = sys.argv[1], sys.argv[2] == "enabled"
if enabled:
    import fla_npu
    fla_npu.enable()
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, trust_remote_code=True).eval()
ids = torch.randint(0, 64, (2, 70), generator=torch.Generator().manual_seed(0))
mask = torch.ones_like(ids)
mask[0, :30] = 0
gates = []
for old_gate in (True, False):
    model.layer.old_gate = old_gate
    with torch.no_grad():
        padded, alone = model(ids, attention_mask=mask).logits, model(ids[:1, 30:]).logits
    assert float((padded[0, 30:] - alone[0]).abs().max()) < 1e-5  # chunks against steps, packed against alone
    gates.append(padded)
assert torch.equal(*gates)
model.train()(ids, attention_mask=mask).logits.square().mean().backward()
assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
fla_npu.disable()
with torch.no_grad():
    assert torch.equal(model(ids, attention_mask=mask).logits, padded)  # a model that exists goes on
print("ran")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "modeling_remote.py").write_text(MODELING)
    config = {
        "model_type": "remote_kda",
        "auto_map": {
            "AutoConfig": "modeling_remote.RemoteConfig",
            "AutoModelForCausalLM": "modeling_remote.RemoteModel",
        },
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    return checkpoint


def run(folder: Path, mode: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"HF_HOME": str(folder.parent / "hub"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", PROGRAM, folder, mode], capture_output=True, text=True, env=variables)


def test_runs_with_its_own_imports_of_fla(folder):
    result = run(folder, "enabled")
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("ran\n")


def test_cannot_run_otherwise(folder):
    result = run(folder, "not enabled")
    assert result.returncode != 0
    assert "fla" in result.stderr.splitlines()[-1]


def test_the_old_form_of_the_gate_is_the_new_one():
    with fla_npu.enabled():
        from fla.ops.kda.gate import fused_kda_gate

        generator = torch.Generator().manual_seed(0)
        g, bias = torch.randn(2, 5, 3 * 8, generator=generator), torch.randn(3 * 8, generator=generator)
        A_log = torch.randn(1, 1, 3, 1, generator=generator)
        expected = naive_kda_gate(g.double().unflatten(-1, (3, 8)), A_log.double(), bias.double())
        for result in (fused_kda_gate(g, A_log, 8, g_bias=bias), fused_kda_gate(g.unflatten(-1, (3, 8)), A_log, bias)):
            torch.testing.assert_close(result.double(), expected.double(), rtol=1e-6, atol=1e-6)
