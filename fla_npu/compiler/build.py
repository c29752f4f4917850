"""What to compile: a kernel, the types of its arguments, its constants and its launch options. Needs no triton."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DTYPES = ("i1", "i8", "i32", "i64", "fp16", "bf16", "fp32")
"""Argument types that triton-ascend accepts; a pointer to one is written `*bf16`."""

FRONT_END_OPTIONS = frozenset(
    {"enable_linearize", "enable_nd2nz_on_vector", "enable_select_analysis", "force_simt_template", "compile_mode"}
)
"""Launch keywords that change the lowering to Linalg rather than the vendor compiler's command line."""

COMPILER_FLAGS = {
    "multibuffer": "--enable-auto-multi-buffer",
    "enable_auto_bind_sub_block": "--enable-auto-bind-sub-block",
    "enable_hivm_auto_cv_balance": "--enable-hivm-auto-cv-balance",
    "sync_solver": "--enable-hivm-graph-sync-solver",
    "unit_flag": "--enable-hivm-unit-flag-sync",
    "inject_barrier_all": "--enable-hivm-inject-barrier-all-sync",
    "inject_block_all": "--enable-hivm-inject-block-all-sync",
    "limit_auto_multi_buffer_only_for_local_buffer": "--limit-auto-multi-buffer-only-for-local-buffer",
    "limit_auto_multi_buffer_of_local_buffer": "--limit-auto-multi-buffer-of-local-buffer",
    "set_workspace_multibuffer": "--set-workspace-multibuffer",
    "tile_mix_vector_loop": "--tile-mix-vector-loop",
    "tile_mix_cube_loop": "--tile-mix-cube-loop",
    "disable_auto_inject_block_sync": "--disable-auto-inject-block-sync",
    "enable_ubuf_saving": "--enable-ubuf-saving",
}
"""Launch keyword -> the vendor compiler's flag. `enable_ubuf_saving` is one from triton-ascend 3.2.1 on."""


@dataclass(frozen=True)
class KernelBuild:
    """One kernel with everything the compiler needs to know about a launch.

    Args:
        name: unique name, for example `chunk_gdn-bf16-K128-V128-C64-exact`.
        kernel: `package.module:function`, or `path/to/file.py:function`; imported only when compiling.
        signature: argument -> type, `"*bf16"` or `"i32"`. `"*bf16:16"` marks a pointer divisible by 16.
        constants: compile-time argument -> value.
        options: launch keywords (`multibuffer`, `unit_flag`, `set_workspace_multibuffer`, ...); `None` is the default.
    """

    name: str
    kernel: str
    signature: Mapping[str, str]
    constants: Mapping[str, int | float | bool | str | None] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if ":" not in self.kernel:
            raise ValueError(f"kernel must be 'module:function' or 'file.py:function', got {self.kernel!r}")
        for argument, kind in self.signature.items():
            if not re.fullmatch(rf"\*?({'|'.join(DTYPES)})(:16)?", kind):
                raise ValueError(
                    f"signature[{argument!r}] must be one of {', '.join(DTYPES)}, with a leading * for a "
                    f"pointer and a trailing :16 for one divisible by 16, got {kind!r}"
                )
        both = sorted(set(self.signature) & set(self.constants))
        if both:
            raise ValueError(f"an argument is in signature or in constants, not in both, got {', '.join(both)}")
        unknown = sorted(set(self.options) - set(COMPILER_FLAGS) - FRONT_END_OPTIONS)
        if unknown:
            raise ValueError(
                f"options must be among {', '.join(sorted({*COMPILER_FLAGS, *FRONT_END_OPTIONS}))}, "
                f"got {', '.join(unknown)}"
            )

    def __hash__(self) -> int:
        return hash(self.to_json())

    def to_json(self) -> str:
        """The build as one JSON object with sorted keys: equal builds give equal text."""
        return json.dumps(self.as_dict(), sort_keys=True)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kernel": self.kernel,
            "signature": dict(self.signature),
            "constants": dict(self.constants),
            "options": dict(self.options),
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "KernelBuild":
        return cls(**record)

    def compiler_flags(self) -> list[str]:
        """Flags of the vendor compiler for these options, on top of the defaults that triton-ascend always passes."""
        chosen = {"multibuffer": True, "enable_auto_bind_sub_block": True, **self.options}
        return [f"{COMPILER_FLAGS[k]}={v}" for k, v in chosen.items() if k in COMPILER_FLAGS and v is not None]
