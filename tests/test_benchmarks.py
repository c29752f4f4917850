"""The benchmark harness without its peers: the registry, the gate, the predictions, the summary."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import gate, inputs, registry, report, rows
from benchmarks.peers import gemm, torch_call
from benchmarks.registry import OURS, Case, PeerMissing


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from threads, and lose much when the tests share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SMALL = Case("gdn", "forward", T=8, H=2, HV=2, D=16)


def timing(case: Case, implementation: str, seconds: float, **changes) -> dict:
    values = {"extra_bytes": 10**6, "nmse": 1e-13, "other_cores": 0.0, **rows.timed([seconds, seconds * 1.1])}
    return rows.row(case, implementation, 1, rows.OK, **{**values, **changes})


RUN = {
    "date": "2026-01-01 00:00:00 UTC",
    "grid": "default",
    "commit": "abc",
    "machine": {"cpu": "some CPU", "cores": 2, "features": ["avx2"], "memory_gb": 8.0, "system": "Linux x86_64"},
    "versions": {"torch": "2.0"},
    "omp_wait_policy": "default",
}


@pytest.mark.parametrize("grid", registry.GRIDS)
def test_grids_are_well_formed(grid):
    cases = registry.cases(grid)
    assert len({case.key for case in cases}) == len(cases)
    for case in cases:
        assert case.op in registry.OPS and case.mode in registry.MODES and case.dtype in registry.DTYPES
        assert case.HV % case.H == 0 and (case.mode != "decode" or case.T == 1)
        names = [one.name for one in registry.implementations(case)]
        assert OURS in names and len(names) >= 3
    works = [case.work for case in cases if (case.op, case.mode) == ("gdn", "forward")]
    assert works == sorted(works)
    assert {case.op for case in registry.memory_cases(grid)} == set(registry.OPS)


def test_default_grid_is_a_star():
    centre = Case("gdn", "forward")
    for case in registry.cases("default"):
        if (case.op, case.mode) == ("gdn", "forward") and case.dtype == "fp32":
            changed = [name for name, value in case.record().items() if value != centre.record()[name]]
            assert changed in ([], ["T"], ["B"], ["D"], ["H", "HV"])


def test_macs_of_one_chunk_match_the_gemm_shapes():
    assert registry.chunk_macs(128, 128) == 3 * 64 * 128 * 128 + 4 * 64 * 64 * 128
    for K, V in ((128, 128), (64, 32)):
        assert registry.chunk_macs(K, V) == sum(m * k * n for m, k, n in gemm.products(K, V))
    case = Case("kda", "forward", T=100, H=3, HV=3)
    assert registry.case_macs(case) == 3 * 2 * registry.chunk_macs(128, 128)
    assert registry.case_macs(replace(case, mode="forward+backward")) == 3 * registry.case_macs(case)


def test_targets_exist_without_importing_their_peers():
    for one in registry.IMPLEMENTATIONS:
        module, function = one.target.split(":")
        assert f"def {function}(case: Case, inputs: Inputs)" in Path(find_spec(module).origin).read_text()
    assert registry.BY_NAME["gemm"].load() is gemm.prepare


def test_missing_peer_is_reported_with_its_package():
    absent = replace(registry.BY_NAME["ggml"], target="benchmarks.peers.no_such_peer:prepare")
    with pytest.raises(PeerMissing, match=r"ggml-python: No module named 'benchmarks.peers.no_such_peer'"):
        absent.load()


@pytest.mark.parametrize("op", registry.OPS)
@pytest.mark.parametrize("mode", registry.MODES)
def test_gate_accepts_the_recurrence_and_rejects_a_wrong_one(op, mode):
    case = Case(op, mode, HV=32 if op == "gdn" else 16)

    def prepare(small, tensors, error=0.0):
        def forward(*arguments):
            output, state = inputs.recurrence(inputs.Inputs(*arguments), small)
            return output * (1 + error), state

        return torch_call(small, tensors, forward)

    assert gate.check(prepare, case) < 1e-11
    with pytest.raises(gate.Wrong, match=r"o is wrong: NMSE 1.0e-06"):
        gate.check(lambda *arguments: prepare(*arguments, error=1e-3), case)
    with pytest.raises(gate.Wrong, match="missing"):
        gate.check(lambda small, tensors: lambda: prepare(small, tensors)()[:1], case)
    with pytest.raises(gate.Wrong, match="nan"):
        gate.check(lambda *arguments: prepare(*arguments, error=float("nan")), case)


def test_inputs_are_reproducible_and_in_range():
    case = replace(SMALL, op="kda", dtype="bf16", mode="forward+backward")
    tensors = inputs.make(case)
    assert torch.equal(tensors.q, inputs.make(case).q)
    assert tensors.q.dtype == torch.bfloat16 and tensors.g.dtype == tensors.state.dtype == torch.float32
    assert tensors.g.shape == (1, 8, 2, 16) and tensors.g.max() < 0
    assert tensors.beta.min() > 0 and tensors.beta.max() < 1
    q, _ = inputs.normalise(tensors.q, tensors.k, HV=4)
    torch.testing.assert_close(q.norm(dim=-1), torch.ones(1, 8, 4))


def test_gemm_call_runs_every_block():
    case = replace(SMALL, T=64 * 40, D=16)
    gemm.prepare(case, inputs.make(case))()


def test_predictions_use_the_largest_smaller_case():
    limits = rows.Limits(seconds=20, gigabytes=8)
    done = [
        timing(Case("kda", "forward", T=512), "hf_chunk", 100.0),
        timing(Case("kda", "forward", T=1024), "hf_chunk", 2.0, extra_bytes=2 * 10**9),
        timing(Case("kda", "forward", T=16384), "hf_chunk", 1.0),
    ]
    assert rows.predict(Case("kda", "forward", T=2048), "hf_chunk", done, limits) is None
    assert rows.predict(Case("kda", "forward", T=8192), "hf_chunk", done, limits) == (
        "16 GB predicted from 'kda forward B1 T1024 H16 D128 fp32', limit 8 GB"
    )
    slow = [timing(Case("kda", "forward", T=1024), "hf_chunk", 6.0)]
    assert "25 s per call predicted" in rows.predict(Case("kda", "forward", T=4096), "hf_chunk", slow, limits)
    for other in (Case("gdn", "forward", T=4096), Case("kda", "forward+backward", T=4096)):
        assert rows.predict(other, "hf_chunk", slow, limits) is None
    assert rows.predict(Case("kda", "forward", T=4096), "ggml", slow, limits) is None


def test_summary_of_saved_rows(tmp_path):
    case = Case("gdn", "forward")
    records = [
        timing(case, OURS, 0.1),
        timing(case, "hf_chunk", 0.42, other_cores=0.5),
        rows.row(case, "ggml", 1, rows.MISSING, "ggml-python: no module"),
        rows.row(replace(case, T=65536), "hf_chunk", 1, rows.SKIPPED, "99 s per call predicted"),
    ]
    rows.save(tmp_path / "timings.json", [RUN], records)
    saved = rows.load(tmp_path / "timings.json")
    assert saved["rows"] == json.loads(json.dumps(records)) and saved["runs"] == [RUN]
    memory = {"runs": [RUN], "rows": [timing(case, OURS, 0.1, extra_bytes=64 * 10**6)]}
    text = report.summary(saved, memory)
    assert "## Gated DeltaNet, forward" in text and "Kimi" not in text
    assert "| 1 \\* | 4096 | 16 | 128 | fp32 | 1 | 105 ms | 10% |" in text
    assert "441 ms (4.2x) | missing |" in text
    assert "| skipped | 99 s per call predicted |" in text
    assert "64 MB" in text and "1.0e-13" in text and "some CPU" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.endswith(" |") for line in lines)


def test_reasons_name_no_folders():
    reason = rows.row(SMALL, "ggml", 1, rows.FAILED, "no 'x' (/home/me/lib/y.py), 3 GB/s, /z")["reason"]
    assert reason == "no 'x' (y.py), 3 GB/s, /z"


def test_summary_without_rows():
    empty = rows.load(Path("nowhere.json"))
    assert "No run yet" in report.summary(empty, empty)


def test_durations():
    assert [report.duration(x) for x in (12.34, 0.0123, 8.4e-6)] == ["12.3 s", "12.3 ms", "8.40 us"]
