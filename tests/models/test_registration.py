"""What importing does: to transformers' Auto classes, without transformers, and to other owners of a model type."""

import subprocess
import sys


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_the_package_leaves_transformers_alone():
    assert (
        python("import sys, fla_npu, fla_npu.layers, fla_npu.layers.attn; print('transformers' in sys.modules)")
        == "False"
    )


def test_a_taken_model_type_is_left_alone():
    code = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from transformers import AutoConfig, AutoModel, PretrainedConfig
class Other(PretrainedConfig):
    model_type = "kda"
AutoConfig.register("kda", Other)
from fla_npu.models import KDAConfig, KDAModel
print(AutoConfig.for_model("kda").__class__.__name__, AutoConfig.for_model("gated_deltanet").__class__.__name__)
tiny = dict(hidden_size=8, head_dim=4, num_heads=1, num_hidden_layers=1, vocab_size=5, intermediate_size=4)
print(type(AutoModel.from_config(KDAConfig(**tiny))) is KDAModel)
"""
    *log, names, ours = python(code).splitlines()
    log = next(line for line in log if "'kda'" in line)
    assert "the model type 'kda' belongs to <class '__main__.Other'>" in log and "KDAForCausalLM" in log
    assert names == "Other GatedDeltaNetConfig" and ours == "True"


def test_without_transformers():
    code = """
import sys
sys.modules["transformers"] = None
from fla_npu.models.utils import Cache
import fla_npu.models
Cache().update(recurrent_state=1)
try:
    fla_npu.models.KDAConfig
except RuntimeError as error:
    print(error)
print(hasattr(fla_npu.models, "Nothing"))
"""
    message, has_nothing = python(code).splitlines()
    assert "is not installed: pip install 'fla-npu[transformers]'" in message and has_nothing == "False"
