"""Functions run by two processes that talk over gloo."""

import importlib
import os
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

WORLD = 2
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
"""How long one process waits for the other, which may be computing something."""


def run_cases(module: str, names: list[str], folder: Path, timeout: float) -> list[str]:
    """Run functions of a module in two processes, one after the other.

    Args:
        module: where the functions are; they take the mesh and a folder, and raise where something is wrong.
        names: of the functions.
        folder: an empty one, that both processes see.
        timeout: seconds after which the processes are ended.

    Returns:
        Reports of the processes on the first function that failed or did not finish; none where all is well. No
        function is run after one that failed: the processes may be at different points of their conversation.
    """
    # A file in place of a port: two runs at a time cannot meet.
    context = mp.spawn(_main, (module, names, folder), nprocs=WORLD, join=False)
    try:
        context.join(timeout)
    except (ProcessExitedException, ProcessRaisedException):
        pass  # the reports tell
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    for name in names:
        files = [folder / f"{name}.{rank}" for rank in range(WORLD)]
        texts = [f.read_text() if f.exists() else "did not finish" for f in files]
        if any(texts):
            return [f"{name} in process {rank}: {text}" for rank, text in enumerate(texts) if text]
    return []


def _main(rank: int, module: str, names: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    # What torchrun tells a process; transformers reads it.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD, timeout=COLLECTIVE_TIMEOUT
    )
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    cases = importlib.import_module(module)
    for name in names:
        torch.manual_seed(0)
        try:
            getattr(cases, name)(mesh, folder)
            dist.barrier()
        except Exception:
            (folder / f"{name}.{rank}").write_text(traceback.format_exc())
            raise
        (folder / f"{name}.{rank}").touch()
    dist.destroy_process_group()
