"""Kernels compiled by the vendor's compiler: known figures, every diagnostic by a kernel that earns it, evaluation.

Figures of the fused forward are those of an independent count of the same compiler's output (`docs/compiler.md`).
"""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu.cli.main import main
from fla_npu.compiler import KernelBuild, cache, compile_build, compile_many
from fla_npu.compiler.__main__ import main as module_command
from fla_npu.compiler.evaluate import EvaluationError, Program, launch
from fla_npu.compiler.lower import Lowerer, LoweringError, lower

FILE = str(Path(__file__).with_name("kernels.py"))
GDN = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "g": "*fp32", "beta": "*fp32", "o": "*bf16", "ht": "*fp32"}
GDN = {**GDN, "n_task": "i32", "T": "i32", "H": "i32", "scale": "fp32"}
GRAM = {"q": "*bf16", "k": "*bf16", "o": "*fp32", "n": "i32"}
PACKED = {"x": "*bf16", "o": "*fp32", "cu": "*i32", "N": "i32", "H": "i32"}
ONE_DEEP = {"set_workspace_multibuffer": 1}


def build(kernel, signature, constants, options=None, name=None):
    return KernelBuild(name or kernel, f"{FILE}:{kernel}", signature, constants, options or {})


def gdn(tile):
    return build("fused_gdn", GDN, {"C": 64, "K": 128, "V": 128, "BV": tile, "STEPS": 5}, name=f"gdn{tile}")


WIDE = {"x": "*fp32", "y": "*fp32", "o": "*fp32", "n": "i32"}
BUILDS = {
    "gdn64": gdn(64),
    "gdn128": gdn(128),
    "gram": build("gram", GRAM, {"C": 64, "K": 128}, ONE_DEEP),
    "gram, four deep": build("gram", GRAM, {"C": 64, "K": 128}),
    "transposed_load": build("transposed_load", GRAM, {"C": 32, "K": 32}, ONE_DEEP),
    "scalar_sum": build("scalar_sum", {"x": "*fp32", "o": "*fp32", "n": "i32"}, {"C": 256}),
    "wide": build("wide", WIDE, {"C": 4096}),
    "wide, retried": build("wide", WIDE, {"C": 16384}),
    "wide, too wide": build("wide", WIDE, {"C": 32768}),
    "crashing": build("crashing", GRAM, {"C": 64, "K": 128}, ONE_DEEP),
    "packed": build("packed", PACKED, {"C": 64, "K": 128}),
    "packed_while": build("packed_while", {"x": "*fp32", "o": "*fp32", "cu": "*i32", "N": "i32"}, {"C": 1024}),
    "data_dependent": build("data_dependent", {"x": "*fp32", "o": "*fp32", "gate": "*fp32", "n": "i32"}, {"C": 1024}),
    "refused": build("gram", {**GRAM, "n": "*i32"}, {"C": 64, "K": 128}),
}


@pytest.fixture(scope="module", autouse=True)
def cache_directory(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLA_NPU_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def compiled(cache_directory):
    """Every build for 910B3."""
    return dict(zip(BUILDS, compile_many(BUILDS.values(), ["910B3"]), strict=True))


@pytest.fixture(scope="module")
def on_a5(cache_directory):
    """The fused forward and the small product for A5."""
    return dict(zip(("gdn64", "gram"), compile_many([BUILDS["gdn64"], BUILDS["gram"]], ["950"]), strict=True))


@pytest.mark.parametrize(
    ("name", "macs", "cube", "vector", "peak", "workspace"),
    [
        (
            "gdn64",
            5_767_168,
            (32_768, 172_032, 253_952),
            (4_480, 106_496, 4_096, 65_540),
            (194_336, 409_600, 32_768),
            385_056,
        ),
        (
            "gdn128",
            7_864_320,
            (32_768, 229_376, 352_256),
            (8_576, 155_648, 8_192, 94_212),
            (194_304, 524_288, 65_536),
            540_704,
        ),
    ],
)
def test_fused_forward_has_the_known_figures(compiled, name, macs, cube, vector, peak, workspace):
    report = compiled[name].report
    assert report.ok, report.problems
    assert report.split == "held"
    assert not report.retried
    chunk = report.chunk
    assert chunk.by("macs") == {"bf16": macs}
    gm = chunk.gm
    assert (gm["AIC read user"], gm["AIC read workspace"], gm["AIC write workspace"]) == cube
    # The known figures are those of one vector core; the two do the same.
    both = ("AIV read user", "AIV read workspace", "AIV write user", "AIV write workspace")
    assert tuple(gm[key] for key in both) == tuple(2 * value for value in vector)
    assert {k: v for k, v in chunk.by("calls").items() if k in ("nd2nz", "mma", "fixpipe")} == {
        "nd2nz": 21,
        "mma": 17,
        "fixpipe": 17,
    }
    assert chunk.by("syncs") == {"FIX": 12, "MTE3": 15, "S": 2}
    assert tuple(report.peak[memory] for memory in ("UB", "L1", "L0C")) == peak
    # The chip table says what the compiler says.
    limits = compiled[name].module.limits
    assert {memory: limits[f"{memory}_SIZE"] // 8 for memory in report.limit} == dict(report.limit)
    assert dict(report.limit) == {"UB": 196_608, "L1": 524_288, "L0C": 131_072}
    assert report.workspace == workspace


def test_l1_to_l0_is_two_operands_a_product(compiled):
    """17 products, bf16: 12 of 64x64x64, and by line of the kernel kk, qk, kS, qS and the update."""
    square, kk, kS, update = 2 * 64 * 64, 2 * 64 * 128, 64 * 128 + 128 * 64, 128 * 64 + 64 * 64
    assert compiled["gdn64"].report.chunk.l1_to_l0 == 2 * (12 * square + 2 * kk + 2 * kS + update)


def test_hand_offs_name_producer_buffer_and_consumer(compiled):
    hand_offs = compiled["gdn64"].hand_offs()
    synced = [hand_off for hand_off in hand_offs if hand_off.kind != "none"]
    assert len(synced) == compiled["gdn64"].report.chunk.syncs == 29
    source = Path(FILE).read_text().splitlines()
    tiles = [(hand_off.direction, tile) for hand_off in hand_offs for tile in hand_off.transfers]

    def line(tile):
        return source[int(tile.producer_line.rsplit(":", 1)[-1]) - 1].strip()

    kk = next(tile for direction, tile in tiles if line(tile).startswith("kk ="))
    assert (kk.tile, kk.bytes, kk.producer) == ("64x64xf32", 16_384, "dot_tb 64x128x64")
    assert [source[int(where.rsplit(":", 1)[-1]) - 1].strip()[:3] for where in kk.consumer_lines] == ["N ="]
    # The state is cast once in the kernel and stored once for each of the two products that read it.
    states = [tile for _, tile in tiles if line(tile).startswith("Sb =")]
    assert [(tile.tile, tile.again) for tile in states] == [("128x64xbf16", False), ("128x64xbf16", True)]
    assert [tile.consumers for tile in states] == [("dot 64x128x64 b",)] * 2
    # Powers of N stay on the cube: stored and read back there, without a hand-off.
    kept = [hand_off for hand_off in hand_offs if hand_off.direction == "cube -> cube"]
    assert len(kept) == 5
    assert all(line(hand_off.transfers[0]).startswith("Nb =") for hand_off in kept)


def test_every_workspace_byte_of_a_chunk_is_a_listed_tile(compiled):
    chunk = compiled["gdn128"].report.chunk
    tiles = [tile for hand_off in compiled["gdn128"].hand_offs() for tile in hand_off.transfers]
    written = chunk.gm["AIC write workspace"] + chunk.gm["AIV write workspace"]
    # Both vector cores store the four bytes of the decay.
    assert sum(tile.bytes for tile in tiles) + 4 == written


def test_split_lost_by_pipelining(compiled):
    held, lost = compiled["gram"].report, compiled["gram, four deep"].report
    assert (held.split, lost.split) == ("held", "lost")
    assert held.ok
    assert any("split" in problem for problem in lost.problems)
    # Without the split both vector cores read the whole product, and one of them writes it.
    assert lost.chunk.gm["AIV read workspace"] == 2 * held.chunk.gm["AIV read workspace"] == 2 * 64 * 64 * 4
    assert lost.chunk.gm["AIV write user"] == held.chunk.gm["AIV write user"] == 64 * 64 * 4


def test_split_lost_by_a_transposed_load(compiled):
    assert compiled["transposed_load"].report.split == "lost"


def test_scalar_loop_is_found_with_its_line(compiled):
    report = compiled["scalar_sum"].report
    (loop,) = report.scalar_loops
    # 256 elements are 255 sums.
    assert (loop.core, loop.elements, loop.in_chunk_loop) == ("AIV", 255, True)
    assert "kernels.py" in loop.source
    assert any("scalar loop over 255 elements" in problem for problem in report.problems)


def test_fit_is_lost_in_two_steps(compiled):
    fits, retried, overflow = (compiled[name].report for name in ("wide", "wide, retried", "wide, too wide"))
    assert fits.ok
    assert (retried.verdict, retried.retried, retried.ok) == ("passed", True, False)
    assert overflow.verdict == "overflow"
    # Three tiles of 32768 floats are 3,145,728 bits.
    assert overflow.needs == (("UB", 3 * 32768 * 32, 192 * 1024 * 8),)
    assert "UB overflow: needs 3,145,728 bits of 1,572,864" in overflow.problems


def test_crash_is_told_from_refusal(compiled):
    crash, refused = compiled["crashing"].report, compiled["refused"].report
    assert crash.verdict == "crash"
    assert "SIG" in crash.message or "LLVM ERROR" in crash.message
    assert refused.verdict == "error"
    assert refused.message


def test_failed_builds_have_no_program(compiled):
    with pytest.raises(ValueError, match="build must have compiled, got UB overflow"):
        _ = compiled["wide, too wide"].module


def packed_lengths():
    return st.lists(st.integers(0, 300), min_size=1, max_size=6)


@settings(max_examples=15)
@given(tokens=st.integers(0, 1000), heads=st.integers(1, 5), grid=st.integers(1, 24))
def test_evaluated_forward_equals_the_formula(compiled, tokens, heads, grid):
    program = Program(compiled["gdn64"].module, compiled["gdn64"].arguments)
    tasks = 2 * heads
    totals = program.launch_totals(launch(grid, {"n_task": tasks, "T": tokens, "H": heads}))
    chunks = [min(64, tokens - t) for t in range(0, tokens, 64)]
    moved = {name: sum(entry.values()) for name, entry in totals.arguments.items()}
    expected = {
        # q and k once for each of the two column tiles of a head; gates by both vector cores.
        "q": tasks * tokens * 128 * 2,
        "k": tasks * tokens * 128 * 2,
        "v": tasks * tokens * 64 * 2,
        "g": 2 * tasks * tokens * 4,
        "beta": tasks * tokens * 4,
        "o": tasks * tokens * 64 * 2,
        "ht": tasks * 128 * 64 * 4,
    }
    assert moved == {name: value for name, value in expected.items() if value}
    # kk and qk have as many rows and columns as the chunk has tokens, reads and update as many rows.
    square = 12 * 64**3
    assert totals.macs == tasks * sum(square + 2 * n * n * 128 + 2 * n * 128 * 64 + 128 * n * 64 for n in chunks)
    # Operands: kk and qk n x 128 twice, reads n x 128 and 128 x 64, update 128 x n and n x 64; two bytes each.
    operands = (12 * 2 * 64**2 + 2 * 2 * n * 128 + 2 * (n * 128 + 128 * 64) + 128 * n + n * 64 for n in chunks)
    assert totals.l1_to_l0 == 2 * tasks * sum(operands)
    assert totals.syncs == tasks * len(chunks) * 29
    assert totals.by("calls").get("mma", 0) == tasks * len(chunks) * 17


@settings(max_examples=15)
@given(lengths=packed_lengths(), heads=st.integers(1, 4), grid=st.integers(1, 8))
def test_packed_sequences_are_walked(compiled, lengths, heads, grid):
    program = Program(compiled["packed"].module, compiled["packed"].arguments)
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    totals = program.launch_totals(launch(grid, {"N": len(lengths), "H": heads}, {"cu": starts}))
    chunks = [min(64, length - t) for length in lengths for t in range(0, length, 64)]
    moved = {name: sum(entry.values()) for name, entry in totals.arguments.items()}
    rows = heads * sum(lengths)
    assert moved == ({"x": rows * 128 * 2, "o": rows * 64 * 4} if rows else {})
    assert totals.by("macs").get("bf16", 0) == heads * 128 * sum(n * n for n in chunks)


@settings(max_examples=15)
@given(lengths=packed_lengths(), grid=st.integers(1, 8))
def test_while_loops_are_walked(compiled, lengths, grid):
    program = Program(compiled["packed_while"].module, compiled["packed_while"].arguments)
    lengths = [10 * length for length in lengths]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    totals = program.launch_totals(launch(grid, {"N": len(lengths)}, {"cu": starts}))
    chunks = sum(-(-length // 1024) for length in lengths)
    assert totals.user_read == totals.user_written == 4 * sum(lengths)
    assert totals.by("vector").get("vexp", 0) == 1024 * chunks


def test_programs_sum_to_the_launch(compiled):
    program = Program(compiled["gdn64"].module, compiled["gdn64"].arguments)
    given_ = launch(3, {"n_task": 8, "T": 100, "H": 4})
    each = [program.totals(i, given_) for i in range(3)]
    assert sum(one.macs for one in each) == program.launch_totals(given_).macs
    # 8 tasks on 3 programs: 3, 3 and 2.
    assert each[0].counts == each[1].counts
    assert 3 * each[2].macs == 2 * each[0].macs


def test_data_dependent_flow_is_refused_by_name(compiled):
    program = Program(compiled["data_dependent"].module, compiled["data_dependent"].arguments)
    with pytest.raises(EvaluationError, match=r"%\d+ in data_dependent is a branch's condition .* contents of gate"):
        program.launch_totals(launch(4, {"n": 4}))


def test_a5_has_no_workspace_and_the_same_products(compiled, on_a5):
    report = on_a5["gdn64"].report
    assert report.verdict == "passed"
    assert report.target == "Ascend950PR_9599"
    # Of this front end A5's compiler does not keep the split.
    assert report.split == "lost"
    assert report.chunk.workspace == report.workspace == 0
    assert set(report.chunk.by("on_core")) == {"l0c to ub", "ub to l1"}
    assert report.chunk.by("macs") == compiled["gdn64"].report.chunk.by("macs")
    assert report.chunk.l1_to_l0 == compiled["gdn64"].report.chunk.l1_to_l0
    assert report.limit["UB"] == 248 * 1024 == on_a5["gdn64"].module.limits["UB_SIZE"] // 8
    assert 0 < report.peak["UB"] <= report.limit["UB"]


def test_a5_is_evaluated_too(on_a5):
    program = Program(on_a5["gdn64"].module, on_a5["gdn64"].arguments)
    totals = program.launch_totals(launch(36, {"n_task": 64, "T": 1000, "H": 32}))
    assert totals.arguments["q"]["read"] == 64 * 1000 * 128 * 2
    assert totals.arguments["o"]["write"] == 64 * 1000 * 64 * 2


def test_another_chip_of_the_family_gives_the_same_chunk(compiled):
    other = compile_build(BUILDS["gram"], "Ascend910_9382").report
    assert other.ok
    assert other.chip == "910_9382"
    assert other.chunk == compiled["gram"].report.chunk


def test_results_are_taken_from_the_cache(compiled, monkeypatch):
    from fla_npu.compiler import bishengir

    def fail(*_, **__):
        raise AssertionError("compiled although the result was there")

    monkeypatch.setattr(bishengir, "run", fail)
    again = compile_build(BUILDS["gram"], "910B3").report
    assert again == compiled["gram"].report
    with pytest.raises(AssertionError):
        compile_build(BUILDS["gram"], "910B3", use_cache=False)


def test_constants_options_and_chips_have_results_of_their_own():
    one = lower(BUILDS["gram"])
    smaller = lower(build("gram", GRAM, {"C": 32, "K": 128}))
    keys = {
        cache.key(lowered.ttir, lowered.linalg, "bishengir-compile", target, flags, "1.2.0")
        for lowered in (one, smaller)
        for target in ("Ascend910B3", "Ascend910B1")
        for flags in ((), ("--enable-auto-multi-buffer=False",))
    }
    assert len(keys) == 8


def test_alignment_reaches_the_front_end():
    marked = {name: kind + ":16" if kind.startswith("*") else kind for name, kind in GRAM.items()}
    assert lower(build("gram", marked, {"C": 64, "K": 128})).linalg.count("tt.divisibility = 16") == 3
    assert "tt.divisibility" not in lower(BUILDS["gram"]).linalg


@pytest.mark.parametrize(
    ("kernel", "signature", "message"),
    [
        ("missing.py:gram", GRAM, "kernel must name an existing file"),
        (f"{FILE}:nothing", GRAM, "kernel must name a @triton.jit function"),
        (f"{FILE}:gram", {"q": "*bf16", "w": "i32"}, "missing k, o, n, C, K, unknown w"),
    ],
)
def test_lowering_says_what_is_wrong(kernel, signature, message):
    with pytest.raises(LoweringError, match=message):
        lower(KernelBuild("b", kernel, signature))


def test_a_dead_front_end_is_reported_and_replaced(tmp_path):
    path = tmp_path / "deadly.py"
    path.write_text("import os\nos._exit(3)\n")
    with Lowerer() as lowerer:
        with pytest.raises(LoweringError, match="deadly: the front end died with code 3"):
            lowerer(KernelBuild("deadly", f"{path}:kernel", GRAM))
        assert lowerer(BUILDS["gram"]).mix_mode == "mix"


def test_interpreter_setting_does_not_reach_the_front_end(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert lower(BUILDS["gram"]).arguments == ("q", "k", "o", "n")


class Builds:
    """Stands for `fla_npu.ops.common.builds`."""

    @staticmethod
    def shipped():
        return BUILDS["gram"], BUILDS["gram, four deep"]

    @staticmethod
    def build_for(op, chip, **shape):
        if op != "gram":
            raise ValueError(f"op must be gram, got {op!r}")
        return BUILDS["gram"], {"n": shape["seq"] // 64}, {}, 20


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla_npu.ops.common.builds", Builds())
    return lambda *arguments: CliRunner().invoke(main, ["compile", *arguments])


def test_command_reports_one_op_and_its_launch(compiled, command, tmp_path):
    done = command("--op", "gram", "--seq", "640", "--json", "--save-ir", str(tmp_path))
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["split"] == "held"
    assert record["launch"]["grid"] == 20
    assert record["launch"]["macs"] == {"bf16": 10 * 64 * 64 * 128}
    assert list(tmp_path.glob("*.hivm.mlir"))
    text = command("--op", "gram", "--seq", "640").stdout
    assert "split       held" in text
    assert f"{10 * 64 * 64 * 128:,}" in text


def test_command_for_all_fails_when_one_fails(compiled, command):
    done = command("--all", "--chip", "910B3")
    assert done.exit_code == 1
    assert "1 of 2 pass" in done.stdout
    assert "2/2" in done.stderr
    record = json.loads(command("--all", "--chip", "910B3", "--json").stdout)
    assert [report["ok"] for report in record["reports"]] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "sort"), "op must be gram, got 'sort'"),
        (("--op", "gram", "--chip", "910C9"), "chip"),
        (("--all", "--chip", "310P"), "chip must be one that the vendor's compiler has a target for, got 310P"),
    ],
)
def test_command_says_what_is_wrong(command, arguments, message):
    done = command(*arguments)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_module_command_explains_hand_offs(compiled):
    signature = ",".join(f"{name}={kind}" for name, kind in GRAM.items())
    arguments = [f"{FILE}:gram", "--sig", signature, "--const", "C=64,K=128", "--opt", "set_workspace_multibuffer=1"]
    done = CliRunner().invoke(module_command, arguments)
    assert done.exit_code == 0, done.output
    assert "dot_tb 64x128x64" in done.stdout
    assert "-> vmuls" in done.stdout


def test_report_as_json_and_text(compiled):
    for one in compiled.values():
        record = json.loads(json.dumps(one.report.as_dict()))
        assert record["verdict"] == one.report.verdict
        assert record["ok"] is one.report.ok
        assert one.report.line().startswith(one.report.name)
        for problem in one.report.problems:
            assert problem in one.report.text()


def test_saved_programs(compiled, tmp_path):
    names = {path.name for path in compiled["gram"].save(tmp_path)}
    assert names >= {"gram.910B3.ttir.mlir", "gram.910B3.linalg.mlir", "gram.910B3.hivm.mlir"}
    assert "sync_block_set" in (tmp_path / "gram.910B3.hivm.mlir").read_text()
