"""The entry of the public functions."""

from typing import Any

import torch

from fla_npu.ops import dispatch, library
from fla_npu.ops.run import run


def call(op: str, **arguments: Any) -> dispatch.Result:
    """`run`; under `torch.compile` as one opaque node of the graph, within which it runs as it would have outside."""
    if not torch.compiler.is_compiling():
        return run(op, **arguments)
    if library.traceable(arguments):
        return library.traced(op, arguments)
    return _outside_the_graph(op, **arguments)


@torch.compiler.disable
def _outside_the_graph(op: str, **arguments: Any) -> dispatch.Result:
    return run(op, **arguments)
