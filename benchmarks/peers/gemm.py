"""Batched GEMMs with the shapes and the number of multiply-accumulates of the chunked algorithm, in fp32 and nothing
else: what PyTorch's matrix product leaves possible. The operands of one block are reused, so they stay in the cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.inputs import Inputs
from benchmarks.registry import CHUNK, Case

BLOCK = 64
"""Chunk-heads per call of `torch.bmm`."""


def products(K: int, V: int, C: int = CHUNK) -> list[tuple[int, int, int]]:
    """(rows, inner, columns) of the products of one chunk and value head, in the order of `registry.chunk_macs`."""
    return [(2 * C, K, V), (2 * C, K, C), (C, C, V), (C, C, V), (K, C, V)]


def prepare(case: Case, inputs: Inputs) -> Callable:
    shapes = products(case.D, case.D)
    if case.mode == "forward+backward":
        # Of a product [m,k] x [k,n] the backward pass computes [m,n] x [n,k] and [k,m] x [m,n].
        shapes = [variant for m, k, n in shapes for variant in ((m, k, n), (m, n, k), (k, m, n))]
    count = case.B * case.HV * -(-case.T // CHUNK)
    block = min(BLOCK, count)
    operands = [(torch.randn(block, m, k), torch.randn(block, k, n), torch.empty(block, m, n)) for m, k, n in shapes]

    def call() -> tuple[torch.Tensor, ...]:
        with torch.inference_mode():
            for start in range(0, count, block):
                size = min(block, count - start)
                for left, right, out in operands:
                    torch.bmm(left[:size], right[:size], out=out[:size])
        return ()

    return call
