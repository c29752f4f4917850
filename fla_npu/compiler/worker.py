"""A process that lowers kernels with triton-ascend: one JSON request per line in, one JSON answer per line out.

A process of its own, because a kernel module imported under `TRITON_INTERPRET=1` can not be compiled any more, and
because the front end keeps state that a failed kernel may leave behind.
"""

import importlib
import importlib.util
import json
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from fla_npu import settings
from fla_npu.compiler.build import FRONT_END_OPTIONS, KernelBuild


def load_kernel(name: str) -> Any:
    """The jitted function that `module:function` or `file.py:function` names."""
    where, _, function = name.rpartition(":")
    if where.endswith(".py"):
        path = Path(where).resolve()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.exists():
            raise ValueError(f"kernel must name an existing file, got {where!r}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    kernel = getattr(module, function, None)
    if not hasattr(kernel, "arg_names"):
        raise ValueError(f"kernel must name a @triton.jit function, got {name!r}")
    return kernel


def lower(build: KernelBuild) -> dict[str, Any]:
    """Triton IR and Linalg text of a build, with source locations, and the arguments in the compiled order."""
    from triton._C.libtriton import ir
    from triton.backends.ascend.compiler import (
        AscendBackend,
        _parse_linalg_metadata,
        make_ttir,
        ttir_to_linalg,
    )
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = load_kernel(build.kernel)
    missing = [name for name in kernel.arg_names if name not in build.signature and name not in build.constants]
    extra = [name for name in (*build.signature, *build.constants) if name not in kernel.arg_names]
    if missing or extra:
        raise ValueError(
            f"signature and constants must cover the arguments of {build.kernel}: "
            f"missing {', '.join(missing) or 'none'}, unknown {', '.join(extra) or 'none'}"
        )
    arguments = [name for name in kernel.arg_names if name in build.signature]
    signature = {name: build.signature[name].removesuffix(":16") for name in arguments}
    # The Linalg does not depend on the chip, but the front end wants one.
    backend = AscendBackend(GPUTarget("npu", "Ascend910B3", 0))
    options = backend.parse_options({k: v for k, v in build.options.items() if k in FRONT_END_OPTIONS})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(fn=kernel, signature=signature, constants=dict(build.constants), attrs=_divisible(build, kernel))
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"target": backend.target, **vars(options)}
    module = make_ttir(module, metadata, options)
    ttir = str(module)
    linalg, metadata = _parse_linalg_metadata(ttir_to_linalg(module, metadata, options, named_ops=True), metadata)
    return {
        "ttir": ttir,
        "linalg": linalg,
        "arguments": arguments,
        "mix_mode": metadata["mix_mode"],
        "kernel": metadata["kernel_name"],
    }


def _divisible(build: KernelBuild, kernel: Any) -> Any:
    from triton.backends.compiler import AttrsDescriptor

    marked = [kernel.arg_names.index(name) for name, kind in build.signature.items() if kind.endswith(":16")]
    return AttrsDescriptor.from_dict({"arg_properties": {"tt.divisibility": marked}, "cls": "AttrsDescriptor"})


def main() -> None:
    settings.allow_compiling()
    # The front end prints; answers go to the real standard output alone.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            answer = lower(KernelBuild.from_dict(json.loads(line)))
        except Exception as error:
            answer = {"error": _message(error), "traceback": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


def _message(error: Exception) -> str:
    text = str(error)
    stderr = getattr(error, "stderr", None)
    if isinstance(stderr, bytes) and stderr:
        text += "\n" + stderr.decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: " + re.sub(r"\s+$", "", "\n".join(lines[:20]))


if __name__ == "__main__":
    main()
