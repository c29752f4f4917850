"""What a build accepts, and that equal builds are equal in every form."""

import json

import pytest

from fla_npu.compiler import KernelBuild

SIGNATURE = {"x": "*bf16", "y": "*fp32:16", "n": "i32"}


def build(**changed):
    fields = {"name": "b", "kernel": "module:function", "signature": SIGNATURE, "constants": {"C": 64}}
    return KernelBuild(**{**fields, **changed})


def test_json_and_back():
    one = build(options={"unit_flag": True})
    again = KernelBuild.from_dict(json.loads(one.to_json()))
    assert again == one
    assert hash(again) == hash(one)


def test_hash_does_not_depend_on_the_order_of_arguments():
    other = build(signature=dict(reversed(SIGNATURE.items())))
    assert hash(other) == hash(build())
    assert other == build()


def test_different_constants_are_different_builds():
    assert len({build(), build(constants={"C": 32}), build(constants={"C": 64})}) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kernel": "module.function"}, "kernel must be 'module:function'"),
        ({"signature": {"x": "bfloat16"}}, r"signature\['x'\] must be one of .* got 'bfloat16'"),
        ({"signature": {"x": "**bf16"}}, r"signature\['x'\]"),
        ({"constants": {"n": 1}}, "not in both, got n"),
        ({"options": {"num_warps": 4}}, "options must be among .*, got num_warps"),
    ],
)
def test_refuses_with_the_reason(changed, message):
    with pytest.raises(ValueError, match=message):
        build(**changed)


def test_flags_carry_the_defaults_of_the_launcher():
    assert build().compiler_flags() == ["--enable-auto-multi-buffer=True", "--enable-auto-bind-sub-block=True"]


def test_options_become_flags_and_none_is_the_compilers_default():
    flags = build(
        options={"multibuffer": False, "set_workspace_multibuffer": 1, "unit_flag": None, "enable_linearize": True}
    ).compiler_flags()
    assert flags == [
        "--enable-auto-multi-buffer=False",
        "--enable-auto-bind-sub-block=True",
        "--set-workspace-multibuffer=1",
    ]
