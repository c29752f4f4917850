"""A name that FLA keeps for an op that it has given up."""

from typing import Any, NoReturn


def fused_chunk_gla(**kwargs: Any) -> NoReturn:
    """Raises NotImplementedError, as in FLA."""
    raise NotImplementedError("fused_chunk_gla is no longer there: use chunk_gla")
