"""Small programs for a GPU, written by hand in the forms that XLA gives them."""

SUM = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}
%max (c: f32[], d: f32[]) -> f32[] {
  %c = f32[] parameter(0)
  %d = f32[] parameter(1)
  ROOT %maximum = f32[] maximum(%c, %d)
}
"""


def module(body: str, parameters: str = "%x = f32[8,64]{1,0} parameter(0)", before: str = "") -> str:
    """Puts instructions into the entry of a module."""
    entry = f"ENTRY %main (x: f32[8,64]) -> f32[] {{\n  {parameters}\n{body}\n}}\n"
    return f"HloModule m, is_scheduled=true\n{SUM}{before}\n{entry}"


CUBLAS = module(
    """  %w = f32[64,32]{1,0} parameter(1)
  %cublas = (f32[8,32]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", metadata={op_name="jit(f)/mlp/dot_general" source_file="/home/me/model.py" source_line=20}, backend_config={"operation_queue_id":"0","gemm_backend_config":{"selected_algorithm":"3","alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"epilogue":"DEFAULT"}}
  ROOT %g = f32[8,32]{1,0} get-tuple-element(%cublas), index=0"""  # noqa: E501
)

SPLIT_K_SAID = module(
    """  %w = bf16[4096,512]{1,0} parameter(1)
  %zero = f32[] constant(0)
  %gemm_fusion_dot = f32[4,8,512]{2,1,0} fusion(%x, %w), kind=kCustom, calls=%gemm, metadata={op_name="jit(f)/dot_general" source_file="model.py" source_line=12}, backend_config={"fusion_backend_config":{"kind":"__triton_gemm","triton_gemm_config":{"block_m":"16","block_n":"64","block_k":"128","split_k":"4","num_stages":"1","num_warps":"4","num_ctas":"1"}}}
  ROOT %red = f32[8,512]{1,0} reduce(%gemm_fusion_dot, %zero), dimensions={0}, to_apply=%sum""",  # noqa: E501
    "%x = bf16[8,4096]{1,0} parameter(0)",
    """%gemm (p0: bf16[8,4096], p1: bf16[4096,512]) -> f32[4,8,512] {
  %p0 = bf16[8,4096]{1,0} parameter(0)
  %p1 = bf16[4096,512]{1,0} parameter(1)
  %v0 = bf16[8,4,1024]{2,1,0} bitcast(%p0)
  %v1 = bf16[4,1024,512]{2,1,0} bitcast(%p1)
  ROOT %dot = f32[4,8,512]{2,1,0} dot(%v0, %v1), lhs_batch_dims={1}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}""",  # noqa: E501
)

_NESTED = """%lhs (q0: bf16[8,4096]) -> bf16[8,4,1024] {
  %q0 = bf16[8,4096]{1,0} parameter(0)
  ROOT %v0 = bf16[8,4,1024]{2,1,0} bitcast(%q0)
}
%rhs (q1: bf16[4096,512]) -> bf16[4,1024,512] {
  %q1 = bf16[4096,512]{1,0} parameter(0)
  ROOT %v1 = bf16[4,1024,512]{2,1,0} bitcast(%q1)
}
%gemm (p0: bf16[8,4096], p1: bf16[4096,512]) -> f32[4,8,512] {
  %p0 = bf16[8,4096]{1,0} parameter(0)
  %p1 = bf16[4096,512]{1,0} parameter(1)
  %f0 = bf16[8,4,1024]{2,1,0} fusion(%p0), kind=kCustom, calls=%lhs, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion","block_level_fusion_config":{"output_tiles":[{"sizes":["16","1","32"]}]}}}
  %f1 = bf16[4,1024,512]{2,1,0} fusion(%p1), kind=kCustom, calls=%rhs, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion","block_level_fusion_config":{"output_tiles":[{"sizes":["1","32","64"]}]}}}
  ROOT %dot = f32[4,8,512]{2,1,0} dot(%f0, %f1), lhs_batch_dims={1}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}"""  # noqa: E501

SPLIT_K_HIDDEN = module(
    """  %w = bf16[4096,512]{1,0} parameter(1)
  %zero = f32[] constant(0)
  %fusion.1 = f32[4,8,512]{2,1,0} fusion(%x, %w), kind=kCustom, calls=%gemm, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion","block_level_fusion_config":{"num_warps":"4","output_tiles":[{"sizes":["1","16","64"]}],"num_ctas":1,"num_stages":1}}}
  ROOT %red = f32[8,512]{1,0} reduce(%fusion.1, %zero), dimensions={0}, to_apply=%sum""",  # noqa: E501
    "%x = bf16[8,4096]{1,0} parameter(0)",
    _NESTED,
)


def softmax(combiner: str) -> str:
    """A Triton fusion that reduces rows."""
    return module(
        """  ROOT %fusion = f32[8]{0} fusion(%x), kind=kCustom, calls=%rows, backend_config={"fusion_backend_config":{"kind":"__triton","block_level_fusion_config":{"num_warps":"4","output_tiles":[{"sizes":["1"]}]}}}""",  # noqa: E501
        before=f"""%rows (p: f32[8,64]) -> f32[8] {{
  %p = f32[8,64]{{1,0}} parameter(0)
  %e = f32[8,64]{{1,0}} exponential(%p)
  %z = f32[] constant(0)
  ROOT %r = f32[8]{{0}} reduce(%e, %z), dimensions={{1}}, to_apply=%{combiner}
}}""",
    )


def scatter(attributes: str = "", combiner: str = "sum") -> str:
    """Rows added to rows that indices name."""
    return module(
        f"""  %i = s32[8,1]{{1,0}} parameter(1)
  %u = f32[8,64]{{1,0}} parameter(2)
  ROOT %s = f32[8,64]{{1,0}} scatter(%x, %i, %u), update_window_dims={{1}}, inserted_window_dims={{0}}, scatter_dims_to_operand_dims={{0}}, index_vector_dim=1{attributes}, to_apply=%{combiner}"""  # noqa: E501
    )


def all_reduce(groups: str, combiner: str = "sum", opcode: str = "all-reduce-start") -> str:
    """A sum over devices."""
    return module(
        f"""  %s = f32[8,64]{{1,0}} {opcode}(%x), replica_groups={groups}, to_apply=%{combiner}, channel_id=2
  ROOT %d = f32[8,64]{{1,0}} all-reduce-done(%s)"""
    )


def custom_call(target: str, attributes: str = "") -> str:
    """A call out of the program."""
    return module(f"""  ROOT %c = f32[8,64]{{1,0}} custom-call(%x), custom_call_target="{target}"{attributes}""")
