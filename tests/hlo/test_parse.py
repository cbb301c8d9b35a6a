"""Reading the text of HLO: against jaxlib's own reader, and in the forms that it is written in."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from bijax.hlo import HloParseError
from bijax.hlo._frames import user_line
from bijax.hlo._parse import parse
from tests.hlo import gpu_programs


def _everything(x, w, i):
    def body(c, _):
        return lax.cond(c.sum() > 0, lambda c: c @ w, jnp.tanh, c), jnp.sort(c)

    c, s = lax.scan(body, x, None, length=3)
    image = jnp.ones((2, 3, 8, 8)) * x.sum()
    pooled = lax.reduce_window(image, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return c, s, jnp.zeros((10, 16)).at[i].add(x), pooled, jnp.cumsum(x, 0), jnp.asarray([1.5, 2.5, -3.0])


@pytest.fixture(scope="module")
def compiled():
    x, w, i = jnp.ones((5, 16)), jnp.ones((16, 16)), jnp.arange(5)
    return jax.jit(jax.grad(lambda *a: sum(o.sum() for o in _everything(*a)), (0, 1))).lower(x, w, i).compile()


def test_it_reads_what_jaxlib_reads(compiled):
    (module,) = parse(compiled.as_text())
    (theirs,) = compiled.runtime_executable().hlo_modules()
    assert {c.name for c in theirs.computations()} == module.computations.keys()
    count = 0
    for computation in theirs.computations():
        ours = module.computations[computation.name]
        assert {i.name for i in computation.instructions()} == ours.instructions.keys()
        for i in computation.instructions():
            mine = ours.instructions[i.name]
            assert [o.name for o in i.operands()] == list(mine.operands)
            assert {u.name for u in i.users()} == {u.name for u in ours.users(mine)}
            assert str(i.opcode).rpartition(".k")[2].lower() == mine.opcode.replace("-", "")
            text = re.sub(r"/\*.*?\*/", "", i.to_string())
            assert f"= {mine.shape_text} {mine.opcode}(" in text
            count += 1
    assert count > 200
    (entry,) = [c for c in module.computations.values() if c.is_entry]
    assert {c for i in entry.instructions.values() for c in i.called} <= module.computations.keys()


def test_lines_of_the_program_are_found(compiled):
    (module,) = parse(compiled.as_text())
    lines = {module.frames.source(i.metadata) for _, i in module}
    assert any(__file__ in line for line in lines)
    assert not any("site-packages" in line for line in lines)


def test_instructions_over_several_lines():
    text = """
Some line that a dump begins with
HloModule by_hand
// a comment
dot_computation {
  p0 = f16[55,120] parameter(0)
  p1 = f16[120,20]{1,0} parameter(1)
  ROOT dot = f16[55,20] dot(f16[55,120] p0, f16[120,20]{1,0} %p1),
    lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY e {
  p0 = f16[55,120]{1,0} parameter(0)
  p1 = f16[120,20]{1,0} parameter(1)
  ROOT _ = (f16[55,20], /*index=1*/s32[]) fusion(p0, p1), kind=kCustom, calls=dot_computation,
    backend_config={
      "fusion_backend_config": {"kind": "__triton_gemm",
        "triton_gemm_config": {"block_m":16,"block_n":64,"block_k":32,"split_k":3}}
    }
}
"""
    (module,) = parse(text)
    dot = module.computations["dot_computation"].instructions["dot"]
    assert dot.operands == ("p0", "p1")
    assert dot.integers("lhs_contracting_dims") == (1,)
    fusion = module.computations["e"].instructions["_"]
    assert [s.dims for s in fusion.shapes] == [(55, 20), ()]
    assert fusion.fusion_config["triton_gemm_config"]["split_k"] == 3
    assert module.computations["e"].is_entry
    assert module.callers["dot_computation"] == [(module.computations["e"], fusion)]


def test_strings_hold_anything():
    text = gpu_programs.custom_call(
        "a", r', backend_config="{\"kind\":\"}],(\"}", frontend_attributes={bijax="kernel"}'
    )
    call = parse(text)[0].computations["main"].instructions["c"]
    assert call.config == {"kind": "}],("}
    assert call.frontend_attributes == {"bijax": "kernel"}
    assert call.target == "a"
    not_json = gpu_programs.custom_call("a", ", backend_config={uplo = 76 : ui8}, api_version=API_VERSION_TYPED_FFI")
    call = parse(not_json)[0].computations["main"].instructions["c"]
    assert call.config == {}
    assert call.attributes["api_version"] == "API_VERSION_TYPED_FFI"


def test_several_modules():
    assert [m.name for m in parse(gpu_programs.CUBLAS + "\n" + gpu_programs.SPLIT_K_SAID)] == ["m", "m"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the text of an HLO module"),
        ("module @jit_f { }", "HloModule NAME"),
        ("HloModule m\n", "found none"),
        (gpu_programs.CUBLAS[:-3], "cut off"),
        (gpu_programs.CUBLAS[:-60], "expected an instruction"),
        (gpu_programs.module("  broken"), "expected an instruction"),
        (gpu_programs.module("  %a = f32[]"), "expected OPCODE"),
        (gpu_programs.module("  %a = (f32[] add(%x, %x)"), r"expected OPCODE"),
        (gpu_programs.module("  %a = f32[] add(%x, %x"), "does not end"),
    ],
)
def test_what_cannot_be_read_is_refused(text, message):
    with pytest.raises(HloParseError, match=message):
        parse(text)


TABLES = """
FileNames
1 "/home/me/train.py"
2 "/env/site-packages/flax/linen/linear.py"
3 "/src/bijax/ops/matmul.py"

FunctionNames
1 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=70 end_line=70 column=1 end_column=2}
3 {file_name_id=3 function_name_id=1 line=700 end_line=700 column=1 end_column=2}

StackFrames
"""


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        # The number of the calling frame, plus one.
        ("1 {file_location_id=1 parent_frame_id=1}\n2 {file_location_id=2 parent_frame_id=2}", "/home/me/train.py:7"),
        # The number itself, and none for the outermost.
        ("1 {file_location_id=1}\n2 {file_location_id=3 parent_frame_id=1}", "/home/me/train.py:7"),
        ("1 {file_location_id=1}\n2 {file_location_id=1 parent_frame_id=9}", "/home/me/train.py:7"),
        ("2 {file_location_id=3 parent_frame_id=2}", "/src/bijax/ops/matmul.py:700"),
        ("1 {file_location_id=1 parent_frame_id=1}", ""),
    ],
)
def test_tables_of_stack_frames(frames, line):
    body = gpu_programs.module('  ROOT %a = f32[8,64]{1,0} add(%x, %x), metadata={op_name="add" stack_frame_id=2}')
    head, _, rest = body.partition("\n")
    (module,) = parse(f"{head}\n{TABLES}{frames}\n\n{rest}")
    assert module.frames.source(module.computations["main"].instructions["a"].metadata) == line


def test_the_users_line_is_the_innermost_outside_of_libraries():
    inner, mine, outer = ("/x/pallas_kernels/rows/tiled.py", 1), ("/me/bijax/train.py", 2), ("/me/main.py", 3)
    assert user_line([inner, mine, outer]) == "/me/bijax/train.py:2"
    assert user_line([inner]) == ""
    assert user_line([("/src/jax/jax/_src/lax/lax.py", 1), mine]) == "/me/bijax/train.py:2"
    assert user_line([]) == ""
