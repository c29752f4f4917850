"""Numeric constants shared by kernels."""

RCP_LN2 = 1.4426950216
"""1 / ln 2 as FLA has it: the decimal form of the float32 0x3FB8AA3B, the one nearest to 1.44269504089.

`exp(x) = exp2(x * RCP_LN2)`; FLA's chunk kernels keep cumulative log decays multiplied by it.
"""
