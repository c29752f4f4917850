"""Tests of the kernels in the interpreter: `TRITON_INTERPRET=1`, in a process of their own, where there is triton."""

import importlib.util
import os

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
