"""The benchmark of long prompts, at short ones."""

import pytest
import torch

pytest.importorskip("psutil", reason="benchmarks need psutil, which the extra `bench` brings")
pytest.importorskip("transformers")

from tqdm import tqdm

from benchmarks import prefill


@pytest.fixture(scope="module", params=prefill.MODELS)
def rows(request):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    measured = prefill.time_case(request.param, 70, 2, tqdm(disable=True))
    torch.set_num_threads(threads)
    return [{**row, "extra_bytes": 10**6} for row in measured]


def test_all_paths_compute_the_same(rows):
    assert [row["path"] for row in rows] == list(prefill.PATHS)
    assert all(row["samples"] == 2 and 0 < row["linear_s"] < row["median_s"] for row in rows)
    different = [row["logit_difference"] for row in rows]
    # None is zero but transformers' own: each path ran its own code.
    assert different[0] == 0 and all(0 < x < 1e-4 for x in different[1:])


def test_table_and_plot(rows, tmp_path):
    pytest.importorskip("matplotlib")
    table = prefill.table(rows).splitlines()
    assert len(table) == 2 + len(rows) and table[2].count("1.00x") == 2
    assert prefill.draw(tmp_path / "prefill.png", rows).stat().st_size > 10_000
