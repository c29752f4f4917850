"""Small device programs as text, in the form that the vendor's compiler leaves behind."""

HEAD = (
    'module attributes {dlti.target_system_spec = #dlti.target_system_spec<"NPU" : #hacc.target_device_spec<'
    '#dlti.dl_entry<"UB_SIZE", 1572864 : i32>, #dlti.dl_entry<"L1_SIZE", 4194304 : i32>, '
    '#dlti.dl_entry<"L0C_SIZE", 1048576 : i32>>>} {\n'
)
GM = "#hivm.address_space<gm>"
UB = "#hivm.address_space<ub>"


def program(body: str, scalars: int = 2, maps: str = "") -> str:
    """A vector program with a float pointer, an i32 pointer and some i32 scalars, `%arg5` the first of them."""
    arguments = [
        "%arg0: i64",
        f"%arg1: memref<?xi8, {GM}>",
        f"%arg2: memref<?xi8, {GM}>",
        f"%arg3: memref<?xf32, {GM}> {{tt.tensor_kind = 0 : i32}}",
        f"%arg4: memref<?xi32, {GM}> {{tt.tensor_kind = 0 : i32}}",
        *(f"%arg{5 + i}: i32" for i in range(scalars + 3)),
    ]
    head = (
        f"  func.func @kernel({', '.join(arguments)}) attributes {{hacc.entry, hacc.function_kind = "
        "#hacc.function_kind<DEVICE>, hivm.func_core_type = #hivm.func_core_type<AIV>} {\n"
    )
    return maps + HEAD + head + CONSTANTS + body + "    return\n  }\n}\n"


CONSTANTS = """\
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c0_i32 = arith.constant 0 : i32
    %c1_i32 = arith.constant 1 : i32
    %c64_i64 = arith.constant 64 : i64
    %cst = arith.constant 0.000000e+00 : f32
"""


def load(rows: str, indent: int = 4) -> str:
    """Brings `rows` x 8 floats on the core: the call whose size and number tests look at."""
    space = " " * indent
    dynamic = rows.startswith("%")
    shape = "?" if dynamic else rows
    lines = [
        f"%view = memref.reinterpret_cast %arg3 to offset: [0], sizes: [{rows}, 8], strides: [8, 1] : "
        f"memref<?xf32, {GM}> to memref<{shape}x8xf32, strided<[8, 1]>, {GM}>",
        f"%tile = hivm.hir.pointer_cast(%c64_i64) : memref<16x8xf32, {UB}>",
        f"func.call @load_gm_to_ubuf_2d_float(%view, %tile, %c0_i32, %cst, %c0) : "
        f"(memref<{shape}x8xf32, strided<[8, 1]>, {GM}>, memref<16x8xf32, {UB}>, i32, f32, index) -> ()",
    ]
    return "".join(f"{space}{line}\n" for line in lines)
