"""The entry of the public functions."""

from typing import Any

import torch

from fla_npu.ops import dispatch, library
from fla_npu.ops.checks import INTS
from fla_npu.ops.run import run


def call(op: str, **arguments: Any) -> dispatch.Result:
    """`run`; under `torch.compile` as one opaque node of the graph, within which it runs as it would have outside."""
    return library.traced(op, arguments) if torch.compiler.is_compiling() else run(op, **arguments)


def call_backwards(op: str, **arguments: Any) -> dispatch.Result:
    """`call` from the last token to the first: the call of the tokens in reverse order.

    Packed sequences then are in reverse order, too, and their states with them.
    """
    packed = arguments.get("cu_seqlens") is not None

    def turned(name: str, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.ndim == 0:
            return x  # no tensor of tokens or states; the checks see to what it ought to be
        if name == "cu_seqlens":
            return x[-1] - x.flip(0) if len(x) and x.dtype in INTS else x
        if name == "initial_state":
            return x.flip(0) if packed else x
        return x.flip(1) if x.ndim > 1 else x

    o, state, states = call(op, **{name: turned(name, x) for name, x in arguments.items()})
    return o.flip(1), state.flip(0) if state is not None and packed else state, states
