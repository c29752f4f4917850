"""The simulator on small programs as text: what each call does, what is an error, what is a hazard."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fla_npu.compiler import simulate as simulator
from fla_npu.compiler.hivm import Block, Op
from fla_npu.compiler.simulate import HazardError, SimulationError, simulate
from fla_npu.compiler.simulator import library, scalar
from fla_npu.compiler.simulator.machine import dense
from fla_npu.compiler.simulator.memory import Memory, View, bf16_bits, bf16_values, granules

HEAD = (
    'module attributes {dlti.target_system_spec = #dlti.target_system_spec<"NPU" : #hacc.target_device_spec<'
    '#dlti.dl_entry<"UB_SIZE", 8192 : i32>, #dlti.dl_entry<"L1_SIZE", 65536 : i32>, '
    '#dlti.dl_entry<"L0C_SIZE", 65536 : i32>>>} {\n'
    "  func.func @k_infer_workspace_shape_function() -> index attributes {hacc.function_kind = "
    "#hacc.function_kind<HOST>} {\n    %c1024 = arith.constant 1024 : index\n    return %c1024 : index\n  }\n"
)
CONSTANTS = """\
    %c0 = arith.constant 0 : index
    %c8 = arith.constant 8 : index
    %c16 = arith.constant 16 : index
    %c0_i32 = arith.constant 0 : i32
    %c2_i32 = arith.constant 2 : i32
    %c0_i64 = arith.constant 0 : i64
    %c-1_i64 = arith.constant -1 : i64
    %c0_i8 = arith.constant 0 : i8
    %c256_i64 = arith.constant 256 : i64
    %true = arith.constant true
    %false = arith.constant false
    %zero = arith.constant 0.000000e+00 : f32
    %two = arith.constant 2.000000e+00 : f32
"""
SPACE = re.compile(r"\b(gm|ub|cbuf|cc)>")
SHORT = {"NONE": ", ".join(["%c-1_i64"] * 6), "SLICE": "memref<8x16xf32, strided<[16, 1], offset: ?>, gm>"}


def function(core, body, name="k", pointers="ff"):
    kinds = {"f": "f32", "h": "f16", "b": "bf16", "i": "i32"}
    arguments = [
        "%arg0: i64",
        "%arg1: memref<?xi8, gm>",
        "%arg2: memref<?xi8, gm>",
        *(f"%arg{3 + i}: memref<?x{kinds[kind]}, gm>" for i, kind in enumerate(pointers)),
        *(f"%arg{3 + len(pointers) + i}: i32" for i in range(4)),
    ]
    text = (
        f"  func.func @{name}({', '.join(arguments)}) attributes {{hacc.entry, hacc.function_kind = "
        f"#hacc.function_kind<DEVICE>, hivm.func_core_type = #hivm.func_core_type<{core}>}} {{\n"
    )
    for short, long in SHORT.items():
        body = body.replace(short, long)
    return SPACE.sub(r"#hivm.address_space<\1>>", text + CONSTANTS + body + "    return\n  }\n")


def module(*functions):
    return HEAD + "".join(functions) + "}\n"


def vector(body, **kwargs):
    return module(function("AIV", body, **kwargs))


def array(name, argument, *sizes):
    """A view of the start of a pointer argument."""
    steps = [str(step) for step in dense(sizes)]
    shape = "x".join(str(size) for size in sizes)
    listed = ", ".join(str(size) for size in sizes)
    return (
        f"    %{name} = memref.reinterpret_cast %arg{argument} to offset: [0], sizes: [{listed}], "
        f"strides: [{', '.join(steps)}] : memref<?xf32, gm> to memref<{shape}xf32, gm>\n"
    )


LOAD = (
    array("x", 3, 16)
    + array("y", 4, 16)
    + """\
    %a = hivm.hir.pointer_cast(%c0_i64) : memref<16xf32, ub>
    %t = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, ub>
    call @load_gm_to_ubuf_1d_float(%x, %a, %c0_i32, %zero, %c0) : () -> ()
"""
)
TO_V = """\
    hivm.hir.set_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]
    hivm.hir.wait_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]
"""
DOUBLE = "    call @vmuls_vs_1d_float(%a, %two, %a, %t) : () -> ()\n"
TO_MTE3 = """\
    hivm.hir.set_flag[<PIPE_V>, <PIPE_MTE3>, <EVENT_ID0>]
    hivm.hir.wait_flag[<PIPE_V>, <PIPE_MTE3>, <EVENT_ID0>]
"""
STORE = "    call @store_ubuf_to_gm_1d_float(%a, %y, %c0_i32) : () -> ()\n"


def pair(count=16):
    return np.arange(count, dtype=np.float32), np.zeros(count, np.float32)


def test_load_compute_store():
    x, y = pair()
    statistics = simulate(vector(LOAD + TO_V + DOUBLE + TO_MTE3 + STORE), [x, y, 0], 1)
    assert np.array_equal(y, 2 * x)
    assert statistics.calls["vmuls_vs_1d_float"] == 1 and not statistics.hazards


@pytest.mark.parametrize(
    "body, kind",
    [
        (LOAD + DOUBLE + TO_MTE3 + STORE, "read after write"),
        (LOAD + TO_V + DOUBLE + STORE, "read after write"),
        (LOAD + TO_V + DOUBLE + TO_MTE3 + STORE + DOUBLE, "write after read"),
        (LOAD + "    call @broadcast_scalar_float_to_1d(%two, %a) : () -> ()\n", "write twice"),
    ],
)
def test_what_no_flag_orders(body, kind):
    x, y = pair()
    with pytest.raises(HazardError) as caught:
        simulate(vector(body), [x, y, 0], 1)
    assert kind in {hazard.kind for hazard in caught.value.statistics.hazards}
    simulate(vector(body), [x, y, 0], 1, check_hazards=False)


def test_a_barrier_over_all_pipes_orders():
    x, y = pair()
    barrier = "    hivm.hir.pipe_barrier[<PIPE_ALL>]\n"
    simulate(vector(LOAD + barrier + DOUBLE + barrier + STORE), [x, y, 0], 1)
    with pytest.raises(HazardError):
        simulate(vector(LOAD + "    hivm.hir.pipe_barrier[<PIPE_V>]\n" + DOUBLE + barrier + STORE), [x, y, 0], 1)


def test_instructions_of_one_pipe_need_a_barrier():
    """Twice the same buffer in place: all of read after write, write after read and write twice."""
    x, y = pair()
    with pytest.raises(HazardError) as caught:
        simulate(vector(LOAD + TO_V + DOUBLE * 2 + TO_MTE3 + STORE), [x, y, 0], 1)
    kinds = {hazard.kind for hazard in caught.value.statistics.hazards}
    assert kinds == {"read after write", "write after read", "write twice"}
    barrier = "    hivm.hir.pipe_barrier[<PIPE_V>]\n"
    simulate(vector(LOAD + TO_V + DOUBLE + barrier + DOUBLE + TO_MTE3 + STORE), [x, y, 0], 1)
    assert np.array_equal(y, 4 * x)


def test_two_programs_that_write_one_place_are_a_hazard():
    x, y = pair()
    with pytest.raises(HazardError, match="write twice"):
        # The first program writes what was not there, the second writes something else.
        simulate(
            vector(LOAD + TO_V + "    %p = hivm.hir.get_block_idx -> i64\n    %f = arith.sitofp %p : i64 to f32\n"
                   "    call @vadds_vs_1d_float(%a, %f, %a, %t) : () -> ()\n" + TO_MTE3 + STORE),
            [x, y, 0], 2,
        )  # fmt: skip


def test_memory_that_nobody_wrote_is_nan():
    x, y = pair()
    simulate(vector(LOAD.replace("call @load", "hivm.hir.set_mask_norm //") + STORE), [x, y, 0], 1)
    assert np.isnan(y).all()


def test_buffers_at_one_place_are_the_same_memory():
    x, y = pair()
    over = """\
    %b = hivm.hir.pointer_cast(%c0_i64) : memref<8xf32, ub>
    call @broadcast_scalar_float_to_1d(%two, %b) : () -> ()
"""
    simulate(vector(LOAD + TO_V + over + TO_MTE3 + STORE), [x, y, 0], 1)
    assert np.array_equal(y, np.where(np.arange(16) < 8, 2, x))


@pytest.mark.parametrize(
    "body, message",
    [
        ("    call @vgather_1d_float(%c0) : () -> ()\n", "library call not understood: vgather_1d_float"),
        ("    %q = arith.strange %c0_i32 : i32\n", "operation not understood: arith.strange"),
        ("    hivm.hir.wait_flag[<PIPE_V>, <PIPE_S>, <EVENT_ID0>]\n", "nobody has set"),
        ("    hivm.hir.set_flag[<PIPE_V>, <PIPE_S>, <EVENT_ID0>]\n", "never waited for"),
        ("    hivm.hir.set_flag[<PIPE_V>, <PIPE_S>, <EVENT_ID0>]\n" * 2, "is set again"),
        (LOAD.replace("sizes: [16]", "sizes: [32]").replace("memref<16xf32", "memref<32xf32"), "access outside memory"),
        (LOAD.replace("%c0_i32, %zero", "%c1_i32, %zero").replace("%x =", "%c1_i32 = arith.constant 1 : i32\n    %x ="),
         "pad mode 1"),
        ("    %p = hivm.hir.pointer_cast(%c0_i64) : memref<16x1x16x8xf32, cbuf>\n", "has no memory cbuf"),
        ("    %q = arith.divsi %c0_i32, %c0_i32 : i32\n", "division by zero"),
    ],
)  # fmt: skip
def test_errors_name_what_is_wrong(body, message):
    with pytest.raises(SimulationError, match=message):
        simulate(vector(SPACE.sub(r"#hivm.address_space<\1>>", body)), [*pair(), 0], 1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([np.zeros(4, np.float32)], "arguments must be 3, got 1"),
        ([np.zeros(4), np.zeros(4, np.float32), 0], r"arguments\[0\] must be a contiguous array of float32"),
        ([np.zeros((4, 4), np.float32).T, np.zeros(4, np.float32), 0], "contiguous"),
        ([*pair(), np.zeros(1)], r"arguments\[2\] must be a number"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulate(vector(""), arguments, 1)


@pytest.mark.parametrize(
    "grid, schedule", [(0, "round_robin"), ((1, 1, 1, 1), "round_robin"), (1, "fast"), (1, "random:")]
)
def test_launches_that_do_not_fit(grid, schedule):
    with pytest.raises(ValueError, match=r"grid must|schedule must"):
        simulate(vector(""), [*pair(), 0], grid, schedule)


def test_masked_load_fills_its_last_block():
    """13 of 16 elements: the value of the mask goes to the end of the 32-byte block, without a mask it is undefined."""
    x, y = pair()
    short = "%xs = memref.subview %x[0] [13] [1] : memref<16xf32, gm> to memref<13xf32, strided<[1]>, gm>\n"
    short += "    %as = memref.subview %a[0] [13] [1] : memref<16xf32, ub> to memref<13xf32, strided<[1]>, ub>\n"
    for mode, expected in (("%c2_i32", 2.0), ("%c0_i32", np.nan)):
        call = f"    call @load_gm_to_ubuf_1d_float(%xs, %as, {mode}, %two, %c0) : () -> ()\n"
        body = LOAD[: LOAD.index("    call")] + "    " + short + call
        simulate(vector(body + TO_V + TO_MTE3 + STORE), [x, y, 0], 1)
        assert np.array_equal(y[:13], x[:13]) and np.array_equal(y[13:], np.full(3, expected), equal_nan=True)


# -- cube and vector ---------------------------------------------------------------------------------------------------

CUBE = (
    array("x", 3, 16, 16)
    + """\
    %a = hivm.hir.pointer_cast(%c0_i64) : memref<2x1x16x8xf32, cbuf>
    %c = hivm.hir.pointer_cast(%c0_i64) : memref<1x1x16x16xf32, cc>
    %w = memref.view %arg2[%c0][] : memref<?xi8, gm> to memref<16x16xf32, gm>
    call @nd2nz_float(%x, %a) : () -> ()
    hivm.hir.set_flag[<PIPE_MTE2>, <PIPE_MTE1>, <EVENT_ID0>]
    call @mma_tile_float_to_float_tb(%a, %a, %true, %c16, %c16, %c16, %c, %c0_i64, NONE, %c0_i8) : () -> ()
    hivm.hir.set_flag[<PIPE_M>, <PIPE_FIX>, <EVENT_ID0>]
    hivm.hir.wait_flag[<PIPE_M>, <PIPE_FIX>, <EVENT_ID0>]
    call @fixpipe_nz2nd_float_to_float_4d_to_2d(%c, %w, %c0_i64, %c0_i64, %false, %c0_i8) : () -> ()
    hivm.hir.sync_block_set[<CUBE>, <PIPE_FIX>, <PIPE_S>] flag = 1 ffts_base_addr = %arg0
"""
)
VECTOR = (
    """\
    %s = hivm.hir.get_sub_block_idx -> i64
    %i = arith.index_cast %s : i64 to index
    %r = arith.muli %i, %c8 : index
    %w = memref.view %arg2[%c0][] : memref<?xi8, gm> to memref<16x16xf32, gm>
    %ws = memref.subview %w[%r, 0] [8, 16] [1, 1] : memref<16x16xf32, gm> to SLICE
"""
    + array("y", 4, 16, 16)
    + """\
    %ys = memref.subview %y[%r, 0] [8, 16] [1, 1] : memref<16x16xf32, gm> to SLICE
    %a = hivm.hir.pointer_cast(%c256_i64) : memref<8x16xf32, ub>
    %t = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, ub>
    %f = memref.collapse_shape %a [[0, 1]] : memref<8x16xf32, ub> into memref<128xf32, ub>
    hivm.hir.sync_block_wait[<VECTOR>, <PIPE_FIX>, <PIPE_S>] flag = 1
    call @load_gm_to_ubuf_2d_float(%ws, %a, %c0_i32, %zero, %c0) : () -> ()
    hivm.hir.set_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]
    hivm.hir.wait_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]
    call @vmuls_vs_1d_float(%f, %two, %f, %t) : () -> ()
    hivm.hir.set_flag[<PIPE_V>, <PIPE_MTE3>, <EVENT_ID0>]
    hivm.hir.wait_flag[<PIPE_V>, <PIPE_MTE3>, <EVENT_ID0>]
    call @store_ubuf_to_gm_2d_float(%a, %ys, %c0_i32) : () -> ()
"""
)
SCHEDULES = ["round_robin", "aic_first", "aiv_first", "random:0", "random:1"]


def mixed(cube=CUBE, vector=VECTOR):
    return module(function("AIC", cube, "k_mix_aic"), function("AIV", vector, "k_mix_aiv"))


def without(text, *parts):
    """A program without the lines that contain these parts."""
    kept = [line for line in text.splitlines() if not any(part in line for part in parts)]
    assert len(kept) == len(text.splitlines()) - len(parts)
    return "\n".join(kept) + "\n"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_product_handed_to_both_vector_cores(schedule):
    x = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    y = np.zeros((16, 16), np.float32)
    statistics = simulate(mixed(), [x, y, 0], 1, schedule)
    # 16 products of numbers around 1 in fp32, in another order than numpy's.
    assert np.abs(y - 2 * x.astype(np.float64) @ x.T).max() < 16 * 16 * 2**-23
    assert statistics.most_pending == 1


def test_a_missing_hand_off_shows():
    x, y = np.ones((16, 16), np.float32), np.zeros((16, 16), np.float32)
    broken = mixed(without(CUBE, "sync_block_set"), without(VECTOR, "sync_block_wait"))
    with pytest.raises(HazardError, match="read after write at byte 0 of workspace"):
        simulate(broken, [x, y, 0], 1, "aic_first")
    simulate(broken, [x, y, 0], 1, "aiv_first", check_hazards=False)
    assert np.isnan(y).all()


@pytest.mark.parametrize(
    "parts, kind",
    [
        (("set_flag[<PIPE_M>", "wait_flag[<PIPE_M>"), "read after write"),
        (("set_flag[<PIPE_MTE2>, <PIPE_MTE1>",), "read after write"),
    ],
)
def test_a_missing_flag_of_the_cube_shows(parts, kind):
    x, y = np.ones((16, 16), np.float32), np.zeros((16, 16), np.float32)
    cube = without(CUBE, *parts)
    if len(parts) == 1:
        cube = cube.replace("%c, %c0_i64", "%c, %c-1_i64")
    with pytest.raises(HazardError, match=kind):
        simulate(mixed(cube), [x, y, 0], 1)


def test_cores_that_wait_for_each_other_are_named():
    with pytest.raises(SimulationError, match=r"wait for each other: AIV0 .* flag = 1; AIV1 .* flag = 1"):
        simulate(mixed(without(CUBE, "sync_block_set")), [*(np.ones((16, 16), np.float32),) * 2, 0], 1)


def test_cross_core_flags_are_used_up():
    arrays = [np.ones((16, 16), np.float32), np.ones((16, 16), np.float32), 0]
    with pytest.raises(SimulationError, match="leaves cross-core flags set: flag 1 from AIC to AIV0: 1 signals"):
        simulate(mixed(vector=without(VECTOR, "sync_block_wait")), arrays, 1, check_hazards=False)
    with pytest.raises(SimulationError, match="was set 16 times"):
        simulate(mixed(CUBE + CUBE.splitlines()[-1].join(["", "\n"]) * 15), arrays, 1, "aic_first")


def test_fixpipe_can_not_read_global_memory():
    body = CUBE.replace("4d_to_2d(%c, %w", "2d_to_2d(%w, %w")
    with pytest.raises(SimulationError, match="fixpipe reads 16x16xf32 at byte 0 of workspace in gm"):
        simulate(mixed(body), [np.ones((16, 16), np.float32), np.ones((16, 16), np.float32), 0], 1)


def test_columns_that_a_short_product_does_not_reach_keep_what_they_had():
    x = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    l1 = Memory.empty("L1", 4096, "cbuf", 32)
    cc = Memory.empty("L0C", 4096, "cc", 32)
    gm = Memory("x", x.reshape(-1).view(np.uint8), "gm", 4)
    tile = View(l1, 0, 0, (4, 1, 16, 8), dense((4, 1, 16, 8)), "f32")
    target = View(cc, 0, 0, (2, 1, 16, 16), dense((2, 1, 16, 16)), "f32")
    library.call("nd2nz_float")([View(gm, 0, 0, x.shape, (32, 1), "f32"), tile])
    left = View(l1, 0, 0, (2, 1, 16, 8), dense((2, 1, 16, 8)), "f32")
    library.call("mma_tile_float_to_float")([left, tile, 1, 16, 16, 9, target, *[-1] * 7, 0])
    result = target.get().transpose(1, 2, 0, 3).reshape(16, 32)
    assert np.abs(result[:, :16] - x[:, :16].astype(np.float64) @ x[:, :16]).max() < 16 * 16 * 2**-23
    assert np.isnan(result[:, 16:]).all()


# -- single calls ------------------------------------------------------------------------------------------------------


def ub(values, kind):
    """An array as a view of a UB of its own."""
    values = np.asarray(values)
    memory = Memory.empty("UB", 4096, "ub", 32)
    view = View(memory, 0, 0, values.shape, dense(values.shape), kind)
    view.put(values)
    return view


def target(shape, kind):
    memory = Memory.empty("UB", 8192, "ub", 32)
    return View(memory, 0, 0, shape, dense(shape), kind)


A = np.array([[1.5, -2.5, 0.5], [3.0, 4.0, -1.0]], np.float32)


@pytest.mark.parametrize(
    "name, operands, kind, expected",
    [
        ("vsub_2d_float", [A, A[:, :1]], "f32", A - A[:, :1]),
        ("vdivs_sv_2d_float", [2.0, A], "f32", np.float32(2) / A),
        ("vmaxs_vs_2d_float", [A, 1.0], "f32", np.maximum(A, 1)),
        ("vabs_2d_float", [A], "f32", np.abs(A)),
        ("reduce_sum_ar_float", [A], "f32", A.sum(1, keepdims=True)),
        ("enablevc_reduce_max_ra_float", [A], "f32", A.max(0, keepdims=True)),
        ("cumsum_ra_float", [A], "f32", A.cumsum(0)),
        ("cumsum_ar_float", [A], "f32", A.cumsum(1)),
        ("broadcast_last_axis_align_2d_float", [A[:, :1]], "f32", np.repeat(A[:, :1], 3, 1)),
        ("broadcast_first_axis_unalign_2d_float", [A[:1]], "f32", np.repeat(A[:1], 2, 0)),
        ("transpose_2d_with_last_axis_float", [A], "f32", A.T),
        ("transpose_3d_with_last_axis_float", [A[:, None]], "f32", A[:, None].transpose(2, 1, 0)),
        ("transpose_3d_without_last_axis_float", [A[:, None]], "f32", A[:, None].transpose(1, 0, 2)),
        ("vcmp_ge_2d_float", [A, A[:, :1]], "i1", A[:, :1] <= A),
        ("vcast_float_to_int32_t_2d_with_mode", [A], "i32", [[2, -2, 0], [3, 4, -1]]),
        ("vcast_float_to_half_2d_with_mode", [A + np.float32(2**-12)], "f16", A + np.float32(2**-12)),
    ],
)
def test_calls(name, operands, kind, expected):
    views = [ub(value, "f32") if isinstance(value, np.ndarray) else value for value in operands]
    expected = np.asarray(expected)
    result = target(expected.shape, kind)
    extra = [0] if "cast" in name else []
    library.call(name)([*views, result, *extra])
    assert np.array_equal(result.get(), expected.astype(result.get().dtype))


def test_rounding_modes():
    values = np.array([-1.5, -0.5, 0.5, 1.5, 2.5], np.float32)
    expected = {0: np.rint, 2: np.floor, 3: np.ceil, 4: np.trunc, 1: lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5)}
    for mode, function_ in expected.items():
        result = target((5,), "f32")
        library.call("vcast_float_to_float_1d_with_mode")([ub(values, "f32"), result, mode])
        assert np.array_equal(result.get(), function_(values))
    with pytest.raises(SimulationError, match="rounding mode 7"):
        library.call("vcast_float_to_float_1d_with_mode")([ub(values, "f32"), target((5,), "f32"), 7])


def test_select_with_packed_bits_and_scratch():
    mask, scratch = ub(np.arange(13) % 3 == 0, "i1"), ub(np.zeros(4), "f32")
    result = target((13,), "f32")
    library.call("vsel_vs_1d_float")([mask, ub(np.arange(13), "f32"), -1.0, result, scratch])
    assert np.array_equal(result.get(), np.where(np.arange(13) % 3 == 0, np.arange(13), -1))
    assert np.isnan(scratch.get()).all()
    inverted = target((13,), "i1")
    library.call("vnot_1d_bool")([mask, inverted, target((0,), "i1")])
    assert np.array_equal(inverted.get(), np.arange(13) % 3 != 0)


def test_arange_over_two_axes():
    result = target((2, 3), "i32")
    library.call("arange_2d_int32_t")([result, 5, 10, 1])
    assert np.array_equal(result.get(), [[5, 6, 7], [15, 16, 17]])


@given(st.floats(width=32, allow_nan=False))
def test_bf16_is_the_nearest(value):
    torch = pytest.importorskip("torch")
    expected = torch.tensor([value], dtype=torch.float32).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert bf16_bits(np.array([value], np.float32))[0] == expected[0]
    assert bf16_values(expected).view(np.uint32)[0] >> 16 == expected[0]


@given(
    st.integers(0, 300),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40)), min_size=1, max_size=3),
    st.sampled_from([1, 8, 16, 32]),
    st.sampled_from([4, 32]),
)
def test_granules_are_those_that_the_elements_lie_in(start, dims, bits, granule):
    shape, strides = tuple(size for size, _ in dims), tuple(step for _, step in dims)
    found = granules(start * bits, shape, strides, bits, granule)
    found = set(range(found.start, found.stop)) if isinstance(found, slice) else set(found.tolist())
    offsets = {0}
    for size, step in dims:
        offsets = {offset + i * step for offset in offsets for i in range(size)}
    expected = set()
    for offset in offsets:
        first = (start + offset) * bits
        expected |= set(range(first // (granule * 8), (first + bits - 1) // (granule * 8) + 1))
    assert found == expected


# -- scalars -----------------------------------------------------------------------------------------------------------


def op(text):
    name = text.split()[0]
    return Op(name, ["%r"], re.findall(r"%\w+", text), text, Block())


@pytest.mark.parametrize(
    "text, operands, expected",
    [
        ("arith.addi %a, %b : i32", (2**31 - 1, 1), -(2**31)),
        ("arith.divsi %a, %b : i32", (-7, 2), -3),
        ("arith.remsi %a, %b : i32", (-7, 2), -1),
        ("arith.divui %a, %b : i8", (-1, 2), 127),
        ("arith.cmpi ult, %a, %b : i32", (-1, 1), 0),
        ("arith.cmpi slt, %a, %b : i32", (-1, 1), 1),
        ("arith.cmpf ogt, %a, %b : f32", (float("nan"), 1.0), 0),
        ("arith.cmpf ugt, %a, %b : f32", (float("nan"), 1.0), 1),
        ("arith.select %c, %a, %b : i32", (0, 3, 4), 4),
        ("arith.extsi %a : i1 to i32", (1,), -1),
        ("arith.extui %a : i1 to i32", (1,), 1),
        ("arith.trunci %a : i64 to i32", (2**32 + 5,), 5),
        ("arith.truncf %a : f32 to f16", (1 + 2**-12,), 1.0),
        ("arith.fptosi %a : f32 to i32", (-2.7,), -2),
        ("arith.mulf %a, %b : f32", (1 + 2**-23, 1 + 2**-23), 1 + 2**-22),
        ("arith.bitcast %a : f32 to i32", (1.0,), 0x3F800000),
        ("math.exp %a : f32", (0.0,), 1.0),
        ("math.absi %a : i32", (-4,), 4),
    ],
)
def test_scalars(text, operands, expected):
    assert scalar.compute(op(text))(*operands) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("arith.constant 0xFF800000 : f32", float("-inf")),
        ("arith.constant 0xFC00 : f16", float("-inf")),
        ("arith.constant 1.000000e-01 : f32", float(np.float32(0.1))),
        ("arith.constant -1 : i64", -1),
        ("arith.constant true", 1),
    ],
)
def test_constants(text, expected):
    assert scalar.constant(op(text)) == expected


def test_loops_branches_and_scalar_memory():
    """Sum of x[1::2] where x is positive, by a scalar loop over memory on the core."""
    body = (
        array("x", 3, 16)
        + array("y", 4, 1)
        + """\
    %c1 = arith.constant 1 : index
    %c2 = arith.constant 2 : index
    %sum = scf.for %i = %c1 to %c16 step %c2 iter_args(%s = %zero) -> (f32) {
      %v = memref.load %x[%i] : memref<16xf32, gm>
      %p = arith.cmpf ogt, %v, %zero : f32
      %n = scf.if %p -> (f32) {
        %t = arith.addf %s, %v : f32
        scf.yield %t : f32
      } else {
        scf.yield %s : f32
      }
      scf.yield %n : f32
    }
    memref.store %sum, %y[%c0] : memref<1xf32, gm>
"""
    )
    x = np.random.default_rng(1).integers(-9, 9, 16).astype(np.float32)
    y = np.zeros(1, np.float32)
    simulate(vector(body), [x, y, 0], 1)
    assert y[0] == np.maximum(x[1::2], 0).sum()


def test_while_loop():
    body = (
        array("y", 4, 1)
        + """\
    %c1_i32 = arith.constant 1 : i32
    %r = scf.while (%a = %c0_i32) : (i32) -> i32 {
      %p = arith.cmpi slt, %a, %arg5 : i32
      scf.condition(%p) %a : i32
    } do {
    ^bb0(%b: i32):
      %n = arith.addi %b, %c2_i32 : i32
      scf.yield %n : i32
    }
    %f = arith.sitofp %r : i32 to f32
    memref.store %f, %y[%c0] : memref<1xf32, gm>
"""
    )
    y = np.zeros(1, np.float32)
    simulate(vector(body), [np.zeros(1, np.float32), y, 7], 1)
    assert y[0] == 8


def test_public_names():
    assert set(simulator.__all__) == {"Hazard", "HazardError", "SimulationError", "Statistics", "simulate"}
