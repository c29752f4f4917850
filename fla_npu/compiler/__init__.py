"""Compile kernels for Ascend chips on any x86-64 machine, and read what the compiler made of them.

Importing needs neither triton nor the vendor's compilers; compiling needs `pip install 'fla-npu[compile]'`.
"""

from fla_npu.compiler.api import Compiled, compile_build, compile_many
from fla_npu.compiler.build import KernelBuild
from fla_npu.compiler.count import Totals
from fla_npu.compiler.handoffs import HandOff, explain_syncs
from fla_npu.compiler.report import Report

__all__ = [
    "Compiled",
    "HandOff",
    "KernelBuild",
    "Report",
    "Totals",
    "compile_build",
    "compile_many",
    "explain_syncs",
]
