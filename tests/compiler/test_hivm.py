"""Reading a program: names, places, buffers, branches, and the verdict from a log."""

import pytest

from fla_npu.compiler import bishengir
from fla_npu.compiler.bishengir import Outcome
from fla_npu.compiler.count import chunk_loop, devices, family, loops
from fla_npu.compiler.hivm import ParseError, memrefs, parse
from fla_npu.compiler.report import analyse, peaks
from tests.compiler.programs import CONSTANTS, UB, load, program

ROW = 8 * 4
HEAD = {"name": "b", "kernel": "m:f", "chip": "910B3", "target": "Ascend910B3", "compiler": "1.2.0"}
PASSED = Outcome("passed", (), False, False, "", "", "module")


def device(body, **options):
    module = parse(program(body, **options))
    return devices(module)[0]


def read(totals):
    return totals.sum("gm", "AIV", "read", "user")


def test_names_used_again_in_another_scope_are_other_values():
    body = "".join(f"    scf.for %i = %c0 to %c1 step %c1 {{\n{load(rows, 6)}    }}\n" for rows in ("16", "4"))
    found = loops(device(body))
    assert [loop.path for loop in found] == ["AIV.0", "AIV.1"]
    assert [read(loop.body) for loop in found] == [16 * ROW, 4 * ROW]


def test_loops_of_known_length_count_with_the_loop_around_them():
    body = (
        "    %c5 = arith.constant 5 : index\n"
        "    scf.for %t = %c0_i32 to %arg5 step %c1_i32  : i32 {\n"
        "      scf.for %i = %c0 to %c5 step %c1 {\n" + load("16", 8) + "      }\n"
        "      scf.for %j = %c0_i32 to %arg6 step %c1_i32  : i32 {\n" + load("16", 8) + "      }\n"
        "    }\n"
    )
    outer, known, unknown = loops(device(body))
    assert (outer.trips, known.trips, unknown.trips) == (None, 5, None)
    assert (outer.has_inner, known.has_inner, unknown.has_inner) == (True, False, False)
    assert [read(loop.body) for loop in (outer, known, unknown)] == [5 * 16 * ROW, 16 * ROW, 16 * ROW]
    chosen = chunk_loop(device(body))
    assert chosen is not None
    assert chosen[0] == "AIV.0"


def test_tails_are_left_out_of_a_full_chunk():
    """A tail's branch does not count, and a size known only at run time counts as the whole tile."""
    body = (
        "    %rows = arith.index_cast %arg5 : i32 to index\n"
        "    %short = arith.cmpi slt, %arg5, %c1_i32 : i32\n"
        "    scf.if %short {\n" + load("16", 6) + "    } {hivm.unlikely_condition}\n" + load("%rows")
    )
    one = device(body)
    total, _ = one.full(one.function.body)
    assert read(total) == 16 * ROW


def test_peak_is_the_highest_byte_with_bits_packed():
    body = (
        "    %c100_i64 = arith.constant 100 : i64\n"
        f"    %a = hivm.hir.pointer_cast(%c100_i64) : memref<64x64xi1, {UB}>\n"
        f"    %b = hivm.hir.pointer_cast(%c64_i64) : memref<4x8xbf16, {UB}>\n"
        f"    %none = hivm.hir.pointer_cast(%c100_i64) : memref<0xf32, {UB}>\n"
    )
    assert peaks([device(body)]) == {"UB": 100 + 512}


def test_locations_and_inlined_calls():
    text = program(load("16")).replace(") -> ()\n", ") -> () loc(#loc3)\n")
    text += (
        '#loc1 = loc("/a/b/kernel.py":12:8)\n#loc2 = loc("/a/b/tiles.py":3:1)\n#loc3 = loc(callsite(#loc2 at #loc1))\n'
    )
    calls = [op for op in parse(text).functions[0].body.walk() if op.callee]
    assert [op.location for op in calls] == ["tiles.py:3 < kernel.py:12"]


def test_types():
    text = f"memref<2x?x16xbf16, strided<[?, 16, 1], offset: ?>, {UB}> to memref<f32, {UB}>"
    first, second = memrefs(text)
    assert (first.shape, first.dtype, first.space) == ((2, None, 16), "bf16", "ub")
    assert (second.shape, second.dtype) == ((), "f32")


@pytest.mark.parametrize("text", ["", "nothing", "module {\n}\n", program(load("16"))[:-40]])
def test_other_texts_are_refused(text):
    with pytest.raises(ParseError):
        parse(text)


@pytest.mark.parametrize(
    ("callee", "expected"),
    [
        ("vadd_1d_float", "vadd"),
        ("vmuls_vs_1d_float", "vmuls"),
        ("vcmp_eq_1d_int32_t", "vcmp_eq"),
        ("vcast_float_to_bfloat16_t_1d_with_mode", "vcast"),
        ("broadcast_scalar_float_to_1d", "broadcast_scalar"),
        ("broadcast_last_axis_align_2d_int32_t", "broadcast_last_axis"),
        ("enablevcg_reduce_sum_ar_float", "reduce_sum"),
        ("mma_tile_bfloat16_t_to_float_tb", "mma"),
        ("load_gm_to_ubuf_2d_bfloat16_t", "load"),
        ("set_l1_2d_bfloat16_t", "set_l1"),
    ],
)
def test_families(callee, expected):
    assert family(callee) == expected


def test_calls_that_nobody_knows_are_a_problem():
    call = f"    func.call @frobnicate(%tile) : (memref<16x8xf32, {UB}>) -> ()\n"
    report = analyse(PASSED, parse(program(load("16") + call)), (), HEAD)
    assert report.unknown_calls == ("frobnicate",)
    assert report.problems == ("calls not counted: frobnicate",)


def test_a_program_that_is_not_understood_is_a_problem_not_a_crash():
    call = "    func.call @vexp_1d_float(%nowhere, %nowhere, %nowhere) : (i1) -> ()\n"
    report = analyse(PASSED, parse(program(call)), (), HEAD)
    assert report.verdict == "passed"
    assert report.problems == ("the compiler's program is not understood: kernel: not a buffer: %nowhere",)


def test_stripped_metadata_keeps_the_buffer():
    body = (
        f"    %tile = hivm.hir.pointer_cast(%c64_i64) : memref<128x1xbf16, {UB}>\n"
        f"    %base, %offset, %sizes:2, %strides:2 = memref.extract_strided_metadata %tile : "
        f"memref<128x1xbf16, {UB}> -> memref<bf16, {UB}>, index, index, index, index, index\n"
        f"    %wide = memref.reinterpret_cast %base to offset: [0], sizes: [128, 1], strides: [16, 1] : "
        f"memref<bf16, {UB}> to memref<128x1xbf16, strided<[16, 1]>, {UB}>\n"
    )
    buffer = device(body).buffers["%wide"]
    assert (buffer.dims, buffer.root, buffer.dtype) == ((128, 1), "%tile", "bf16")


def vector_function(loop):
    """A function of the kind into which the compiler for A5 moves vector code, called by a program."""
    body = (
        f"  func.func @code(%arg0: memref<64xf32, {UB}>, %arg1: index) attributes {{hivm.vector_function}} {{\n"
        f"{CONSTANTS}    %c5 = arith.constant 5 : index\n    %c8 = arith.constant 8 : index\n"
        "    %n = scf.for %i = %c0 to %c5 step %c1 iter_args(%x = %c8) -> (index) {\n"
        f"      scf.for %j = %c0 to {loop} step %c1 {{\n"
        "        %v = ave.hir.vexp %w, %p : vector<64xf32>, vector<64xi1>\n"
        "      }\n      %half = arith.divui %x, %c8 : index\n      scf.yield %half : index\n    }\n    return\n  }\n"
    )
    call = f"    func.call @code(%tile, %c1) : (memref<16x8xf32, {UB}>, index) -> ()\n"
    text = program(load("16") + call)
    return text.replace("  func.func @kernel", body + "  func.func @kernel")


def test_vector_functions_are_walked():
    """An outer loop of five, an inner one of 8, 1, 0, 0 and 0 iterations."""
    report = analyse(PASSED, parse(vector_function("%x")), (), HEAD)
    assert report.ok
    assert report.once is not None
    assert report.once.by("vector") == {"vexp": 64 * 9}


def test_vector_functions_that_depend_on_the_call_are_a_problem():
    report = analyse(PASSED, parse(vector_function("%arg1")), (), HEAD)
    assert report.problems == ("calls not counted: code",)


@pytest.mark.parametrize(
    ("code", "log", "module", "expected"),
    [
        (0, "", "module", ("passed", (), "")),
        (1, "ub overflow, requires 9 bits while 8 bits available!", "", ("overflow", (("UB", 9, 8),), "")),
        (
            1,
            "".join(f"cc overflow, requires {bits} bits while 5 bits available!\n" for bits in (7, 6)),
            "",
            ("overflow", (("L0C", 6, 5),), ""),
        ),
        (-6, "x\nLLVM ERROR: getIndexingMaps not implemented\n#1 0x", "", ("crash", (), "LLVM ERROR: getIndexingMaps")),
        (-11, "#1 0x", "", ("crash", (), "ended by SIGSEGV")),
        (1, "k.mlir:2:1: error: 'scf.for' op is bad", "", ("error", (), "error: 'scf.for' op is bad")),
        # A compiler that fails after writing a program has not passed.
        (1, "[ERROR] Failed to run pipeline", "module", ("error", (), "[ERROR] Failed to run pipeline")),
    ],
)
def test_verdicts(code, log, module, expected):
    outcome = bishengir._outcome(code, log, module)
    assert (outcome.verdict, outcome.needs) == expected[:2]
    assert outcome.message.startswith(expected[2]) if expected[2] else True
    assert bool(outcome.module) == (expected[0] == "passed")


def test_lost_multi_buffering_is_noted():
    log = "[NOTE] Ub overflow detected; automatically set enable-auto-multi-buffer to false and retrying compilation"
    outcome = bishengir._outcome(0, log, "module")
    assert (outcome.verdict, outcome.retried) == ("passed", True)


def test_stages_are_cut_out_of_a_log():
    mark = "// -----// IR Dump After X (x) //----- //\n"
    log = f"before\n{mark}module {{\n}}\n\nbetween\n{mark}"
    log += "#map = affine_map<(d0) -> (d0)>\nmodule {\n  inside\n}\n#loc = loc(unknown)\n[ERROR] after"
    rest, stage = bishengir._cut_stage(log)
    assert rest.splitlines() == ["before", "between", "[ERROR] after"]
    assert stage.splitlines() == ["#map = affine_map<(d0) -> (d0)>", "module {", "  inside", "}", "#loc = loc(unknown)"]
