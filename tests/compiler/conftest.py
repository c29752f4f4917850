"""Tests of the compile path. Those that compile need triton-ascend and the vendor's compilers, the others nothing."""

import importlib.util
import os

if importlib.util.find_spec("ascendnpuir") is None or os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore = [
        "test_compiled.py",
        "test_shipped.py",
        "test_shipped_simulated.py",
        "test_simulate_compiled.py",
        "test_trial.py",
    ]
