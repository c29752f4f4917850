"""The entry of the public functions."""

from typing import Any

import torch

from fla_npu.ops import dispatch, library
from fla_npu.ops.run import run


def call(op: str, **arguments: Any) -> dispatch.Result:
    """`run`; under `torch.compile` as one opaque node of the graph, within which it runs as it would have outside."""
    return library.traced(op, arguments) if torch.compiler.is_compiling() else run(op, **arguments)
