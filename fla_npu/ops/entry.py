"""The entry of the public functions."""

from typing import Any

import torch

from fla_npu.ops import dispatch, library
from fla_npu.ops.checks import INTS, sequence_bounds
from fla_npu.ops.run import run


def call(op: str, **arguments: Any) -> dispatch.Result:
    """`run`; under `torch.compile` as one opaque node of the graph, within which it runs as it would have outside."""
    return library.traced(op, arguments) if torch.compiler.is_compiling() else run(op, **arguments)


def call_backwards(op: str, **arguments: Any) -> dispatch.Result:
    """`call` from the last token to the first: the call of the tokens in reverse order.

    Packed sequences then are in reverse order, too, and their states with them.
    """
    q, bounds = arguments["q"], arguments.get("cu_seqlens")
    packed = bounds is not None
    length = q.shape[1] if isinstance(q, torch.Tensor) and q.ndim > 1 else None
    if isinstance(bounds, torch.Tensor) and bounds.device.type == "cpu" and not torch.compiler.is_compiling():
        sequence_bounds(bounds, length)  # as they were passed, lest a message tells of others

    def turned(name: str, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.ndim == 0:
            return x  # no tensor of tokens or states; the checks see to what it ought to be
        if name == "cu_seqlens":
            return length - x.flip(0) if length is not None and x.dtype in INTS else x
        if name == "initial_state":
            return x.flip(0) if packed else x
        return x.flip(1) if x.ndim > 1 else x

    o, state, states = call(op, **{name: turned(name, x) for name, x in arguments.items()})
    return o.flip(1), state.flip(0) if state is not None and packed else state, states
