"""What is found in programs for a GPU, read as text."""

import pytest

from bijax.hlo import HloInvarianceError, assert_hlo_invariant, inspect, inspect_text
from tests.hlo import gpu_programs
from tests.hlo.gpu_programs import all_reduce, custom_call, module, scatter, softmax

OURS = ', frontend_attributes={bijax="kernel"}'


def only(text):
    (finding,) = inspect_text(text, platform="cuda").findings
    return finding


def test_cublas():
    report = inspect(gpu_programs.CUBLAS)
    assert report.platform == "gpu"
    (found,) = report.variant
    assert (found.kind, found.verdict, found.implementation) == ("library", "variant", "__cublas$gemm")
    assert found.tile == "algorithm 3"
    assert found.terms == 64
    assert found.flops == 2 * 8 * 32 * 64
    assert found.share == 1
    assert found.source == "/home/me/model.py:20"
    assert found.operation == "jit(f)/mlp/dot_general"


@pytest.mark.parametrize(
    ("text", "tile"),
    [
        (gpu_programs.SPLIT_K_SAID, "16x64x128"),
        (gpu_programs.SPLIT_K_HIDDEN, "1x16x64, operands 16x1x32, 1x32x64"),
    ],
)
def test_a_split_of_k_and_the_sum_of_its_parts(text, tile):
    gemm, parts = inspect(text).variant
    assert (gemm.kind, gemm.split_k, gemm.tile, gemm.opcode) == ("split_k", 4, tile, "fusion")
    assert gemm.terms == 1024
    assert gemm.flops == 2 * 8 * 512 * 4096
    assert (parts.kind, parts.opcode, parts.terms) == ("split_k", "reduce", 4)


def test_a_batch_is_no_split():
    gemm = inspect(gpu_programs.SPLIT_K_HIDDEN.replace("dimensions={0}", "dimensions={1}")).variant[0]
    assert (gemm.kind, gemm.split_k) == ("tile", 1)


def test_the_parts_are_found_behind_a_fusion():
    fused = """%add_parts (r0: f32[4,8,512]) -> f32[8,512] {
  %r0 = f32[4,8,512]{2,1,0} parameter(0)
  %z = f32[] constant(0)
  ROOT %red = f32[8,512]{1,0} reduce(%r0, %z), dimensions={0}, to_apply=%sum
}
ENTRY"""
    call = "%fused = f32[8,512]{1,0} fusion(%fusion.1), kind=kLoop, calls=%add_parts"
    text = gpu_programs.SPLIT_K_HIDDEN.replace(
        "%red = f32[8,512]{1,0} reduce(%fusion.1, %zero), dimensions={0}, to_apply=%sum", call
    ).replace("ENTRY", fused)
    assert [(v.kind, v.opcode) for v in inspect(text).variant] == [("split_k", "reduce"), ("split_k", "fusion")]


def test_a_tuned_gemm_without_a_split():
    text = gpu_programs.SPLIT_K_SAID.replace('"split_k":"4"', '"split_k":"1"')
    gemm, total = inspect(text).variant
    assert (gemm.kind, gemm.split_k) == ("tile", 1)
    assert total.kind == "reduction"


def test_attention_of_cudnn():
    config = (
        ', backend_config={"cudnn_fmha_backend_config":{"algorithm":{"algo_id":"7","math_type":"TENSOR_OP_MATH"},'
        '"fmha_scale":1,"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["2","4","8","16"]}}}'
    )
    found = only(custom_call("__cudnn$fmhaSoftmax", config))
    assert (found.tile, found.flops) == ("algorithm 7", 4 * 2 * 4 * 8 * 16 * 64)
    backward = only(custom_call("__cudnn$fmhaSoftmaxBackward", config))
    assert backward.flops == found.flops * 5 // 2


@pytest.mark.parametrize(
    ("name", "opcode"), [("cutlass_gemm", "fusion"), ("dynamic_address_computation", "custom-call")]
)
def test_custom_fusions_are_gemms_or_hold_calls(name, opcode):
    held = """%held (p: f32[8,64]) -> f32[8,64] {
  %p = f32[8,64]{1,0} parameter(0)
  %d = f32[8,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %c = f32[8,64]{1,0} custom-call(%d), custom_call_target="__cublas$gemm"
}"""
    config = f'{{"fusion_backend_config":{{"kind":"__custom_fusion","custom_fusion_config":{{"name":"{name}"}}}}}}'
    body = f"  ROOT %f = f32[8,64]{{1,0}} fusion(%x), kind=kCustom, calls=%held, backend_config={config}"
    assert opcode in [v.opcode for v in inspect(module(body, before=held)).variant]


def test_the_line_of_a_neighbour():
    parts = inspect(gpu_programs.SPLIT_K_SAID).variant[1]
    assert parts.source == "~model.py:12"


def test_triton_fusions_matter_where_they_add():
    assert {found.kind for found in inspect(softmax("sum")).variant} == {"reduction", "elementwise"}
    assert [found.kind for found in inspect(softmax("max")).variant] == ["elementwise"]
    assert inspect(softmax("max").replace("exponential", "negate")).findings == ()


def test_scatters():
    found = only(scatter())
    assert (found.kind, found.implementation, found.verdict) == ("scatter", "atomics", "variant")
    assert inspect(scatter(", unique_indices=true")).invariant
    assert inspect(scatter(combiner="max")).invariant
    assert inspect(scatter().replace("f32", "s32")).invariant


@pytest.mark.parametrize(
    ("groups", "verdict"),
    [
        ("{{0,1,2,3}}", "variant"),
        ("{{0,1},{2,3,4}}", "variant"),
        ("[2,4]<=[8]", "variant"),
        ("{}", "variant"),  # all devices, however many
        ("{{0,1},{2,3}}", "note"),
        ("[4,2]<=[8]", "note"),
        ("{{0},{1}}", None),
    ],
)
@pytest.mark.parametrize("opcode", ["all-reduce-start", "all-reduce", "reduce-scatter"])
def test_sums_over_devices(groups, verdict, opcode):
    found = [f.verdict for f in inspect_text(all_reduce(groups, opcode=opcode), platform="gpu").findings]
    assert found == ([verdict] if verdict else [])
    assert inspect(all_reduce(groups, "max", opcode)).findings == ()


@pytest.mark.parametrize(
    ("target", "kind", "verdict"),
    [
        ("__cublas$lt$matmul$f8", "library", "variant"),
        ("__cudnn$convForward", "library", "variant"),
        ("__cudnn$fmhaSoftmax", "library", "variant"),
        ("cusolver_potrf_ffi", "library", "suspect"),
        ("ApproxTopK", "library", "suspect"),
        ("__cub$DeviceRadixSort", "library", "note"),
        ("mosaic_gpu_v2", "custom_call", "suspect"),
        ("__gpu$xla.gpu.triton", "custom_call", "suspect"),
        ("__gpu$xla.gpu.ptx", "custom_call", "suspect"),
        ("triton_kernel_call", "custom_call", "suspect"),  # jax-triton 0.3
        ("triton_kernel_call_ffi", "custom_call", "suspect"),  # 0.4
        ("somebody_else", "custom_call", "suspect"),
        ("xla_ffi_python_gpu_callback", "custom_call", "suspect"),
    ],
)
def test_calls_out_of_the_program(target, kind, verdict):
    found = only(custom_call(target))
    assert (found.kind, found.verdict, found.implementation) == (kind, verdict, target)
    assert only(custom_call(target, OURS)).verdict == "ours"


@pytest.mark.parametrize("target", ["Sharding", "SPMDFullToShardShape", "cu_threefry2x32_ffi", "AllocateBuffer"])
def test_calls_that_compute_no_sums(target):
    assert inspect(custom_call(target)).findings == ()


REST = {
    "select_and_scatter": (
        "  %z = f32[] constant(0)\n  ROOT %s = f32[8,64]{1,0} select-and-scatter(%x, %x, %z),"
        " window={size=1x2 stride=1x2}, select=%max, scatter=%sum",
        "scatter",
        "variant",
    ),
    "unstable": (
        "  %i = s32[8,64]{1,0} parameter(1)\n"
        "  ROOT %s = (f32[8,64]{1,0}, s32[8,64]{1,0}) sort(%x, %i), dimensions={1}, to_apply=%less",
        "sort",
        "suspect",
    ),
    "random": (
        "  %k = u64[2]{0} parameter(1)\n"
        "  ROOT %r = (u64[2]{0}, u32[8,64]{1,0}) rng-bit-generator(%k), algorithm=rng_philox",
        "random",
        "suspect",
    ),
    "fft": ("  ROOT %f = c64[8,33]{1,0} fft(%x), fft_type=RFFT, fft_length={64}", "library", "suspect"),
    "convolution": (
        "  %k = f32[3,64,7]{2,1,0} parameter(1)\n  ROOT %c = f32[8,64]{1,0} convolution(%x, %k), window={size=3},"
        " dim_labels=b0f_0io->b0f",
        "convolution",
        "variant",
    ),
}


@pytest.mark.parametrize("name", REST)
def test_the_rest(name):
    body, kind, verdict = REST[name]
    found = only(module(body))
    assert (found.kind, found.verdict) == (kind, verdict)
    assert only(module(body + OURS)).verdict == "ours"


def test_a_stable_sort_is_none():
    body = REST["unstable"][0] + ", is_stable=true"
    assert inspect(module(body)).findings == ()


FENCED = """  %{0}_bits = u32[8,64]{{1,0}} bitcast(%{0})
  %{0}_shifted = u32[8,64]{{1,0}} shift-right-logical(%{0}_bits, %ones)
  %{0}_and = u32[8,64]{{1,0}} and(%{0}_bits, %{0}_shifted)
  %{0}_or = u32[8,64]{{1,0}} or(%{0}_bits, %{0}_and)
  %{0}_held = f32[8,64]{{1,0}} bitcast(%{0}_or)
"""
ONES = "  %one = u32[] constant(1)\n  %ones = u32[8,64]{1,0} broadcast(%one), dimensions={}\n"


def fused(body: str, kind: str = "kLoop") -> str:
    """A fusion of the loop emitter, or of Triton, with a body that reads %p."""
    config = '{"fusion_backend_config":{"kind":"__triton"}}' if kind == "kCustom" else "{}"
    before = f"%inner (p: f32[8,64]) -> f32[8,64] {{\n  %p = f32[8,64]{{1,0}} parameter(0)\n{body}\n}}"
    call = f"  ROOT %f = f32[8,64]{{1,0}} fusion(%x), kind={kind}, calls=%inner, backend_config={config}"
    return module(call, before=before)


def reasons(text: str) -> list[str]:
    return [found.reason for found in inspect_text(text, platform="gpu").variant]


def test_a_function_without_a_fence_is_found_on_a_gpu():
    (reason,) = reasons(fused("  ROOT %t = f32[8,64]{1,0} tanh(%p)"))
    assert "without a fence" in reason
    held = f"  %t = f32[8,64]{{1,0}} tanh(%p)\n{ONES}{FENCED.format('t')}  ROOT %n = f32[8,64]{{1,0}} negate(%t_held)"
    assert reasons(fused(held)) == []
    (reason,) = reasons(fused(held, "kCustom"))
    assert "Triton" in reason
    assert "Triton" in reasons(fused(held.replace("tanh(%p)", "divide(%p, %p)"), "kCustom"))[0]
    assert reasons(fused(held.replace("tanh(%p)", "add(%p, %p)"), "kCustom")) == []


def test_a_product_beside_a_sum_is_found_on_a_gpu():
    product = "  %m = f32[8,64]{1,0} multiply(%p, %p)\n"
    (reason,) = reasons(fused(product + "  ROOT %a = f32[8,64]{1,0} add(%m, %p)"))
    assert "contracted" in reason
    assert reasons(fused(f"{product}{ONES}{FENCED.format('m')}  ROOT %a = f32[8,64]{{1,0}} add(%m_held, %p)")) == []
    assert reasons(fused(product + "  ROOT %a = f32[8,64]{1,0} maximum(%m, %p)")) == []


def test_a_product_and_a_sum_in_two_fusions_are_found():
    text = fused("  ROOT %m = f32[8,64]{1,0} multiply(%p, %p)")
    text = text.replace("  ROOT %f = ", "  %f = ").replace(
        "backend_config={}", "backend_config={}\n  %r = f32[8,64]{1,0} copy(%f)\n  ROOT %a = f32[8,64]{1,0} add(%r, %x)"
    )
    (reason,) = reasons(text)
    assert "contracted" in reason


def test_a_rounding_without_a_fence_is_found_on_a_gpu():
    body = """  %h = bf16[8,64]{1,0} convert(%p)
  ROOT %w = f32[8,64]{1,0} convert(%h)"""
    (found,) = inspect_text(fused(body), platform="gpu").variant
    assert found.kind == "rounding"
    assert reasons(fused(body.replace("%h = bf16", "%h = s8"))) == []


def test_a_tag_of_something_else_is_no_kernel():
    assert only(custom_call("mosaic_gpu_v2", ', frontend_attributes={bijax="invariant"}')).verdict == "suspect"
    assert only(custom_call("mosaic_gpu_v2", ', frontend_attributes={x_bijax="kernel"}')).verdict == "suspect"


def test_a_lost_tag_is_not_guessed():
    """A product that says nothing about where it came from is variant, though all around it is ours."""
    around = """  %w = f32[64,64]{1,0} parameter(1)
  %p = f32[8,64]{1,0} negate(%x), frontend_attributes={bijax="kernel"}, metadata={op_name="jit(f)/pad"}
  %d = f32[8,64]{1,0} dot(%p, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
"""
    user = (
        '  ROOT %u = f32[8,64]{1,0} OPCODE(%d), frontend_attributes={bijax="kernel"}, metadata={op_name="jit(f)/NAME"}'
    )
    report = inspect(module(around + user.replace("OPCODE", "negate").replace("NAME", "neg")))
    assert [f.opcode for f in report.variant] == ["dot"]
    assert "perhaps from the code of a bijax kernel" in report.variant[0].reason
    # The reshape of a tagged product is the product's own name.
    assert inspect(module(around + user.replace("OPCODE", "bitcast").replace("NAME", "dot_general"))).invariant


def test_the_tag_of_a_fusion_speaks_for_its_last_instruction_only():
    text = gpu_programs.softmax("sum").replace(
        'backend_config={"fus', 'frontend_attributes={bijax="kernel"}, backend_config={"fus'
    )
    assert [v.kind for v in inspect(text).variant] == ["elementwise", "reduction"]
    tagged = text.replace("exponential(%p)", f"exponential(%p){OURS}").replace("to_apply=%sum", f"to_apply=%sum{OURS}")
    # A function in a Triton fusion is no kernel's, whatever its tag: kernels are fenced too.
    assert [v.kind for v in inspect(tagged).variant] == ["elementwise"]


def test_the_assertion_lists_what_it_found():
    with pytest.raises(HloInvarianceError, match=r"model\.py:20.*cuBLAS") as raised:
        assert_hlo_invariant(gpu_programs.CUBLAS)
    assert isinstance(raised.value, AssertionError)
    assert len(raised.value.report.variant) == 1
    assert_hlo_invariant(custom_call("mosaic_gpu_v2", OURS))
