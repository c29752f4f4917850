"""Numeric constants shared by kernels."""

RCP_LN2 = 1.4426950408889634
"""1 / ln 2. FLA writes 1.4426950216, which is the same number in float32.

`exp(x) = exp2(x * RCP_LN2)`; FLA's chunk kernels keep cumulative log decays multiplied by it.
"""
