"""What every test here starts from: one thread, and nothing enabled."""

import pytest
import torch

import fla_npu


@pytest.fixture(autouse=True)
def one_thread_and_nothing_enabled():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    fla_npu.disable()
    torch.set_num_threads(threads)
