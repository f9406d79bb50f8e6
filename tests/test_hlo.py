"""A compiled program's costs, against a small module added up by hand."""

from svgen.hlo import cost, size_of

MODULE = """HloModule jit_step, entry_computation_layout={()->f32[]}

%fused_computation (p: f32[8]) -> f32[8] {
  ROOT %add.0 = f32[8]{0} add(%p, %p), backend_config={"window_config":{"estimated_cycles":"9999999"}}
}

%condition (c: (s32[], f32[8])) -> pred[] {
  %constant.7 = s32[]{:T(128)} constant(3), metadata={op_name="x"}
  ROOT %lt = pred[]{:T(512)} compare(%i, %constant.7), direction=LT
}

%light (c: f32[8]) -> f32[8] {
  %f.1 = f32[8]{0} fusion(%c), calls=%fused_computation, backend_config={"x":{"estimated_cycles":"10"}}
}

%heavy (c: f32[8]) -> f32[8] {
  %f.2 = f32[8]{0} fusion(%c), calls=%fused_computation, backend_config={"x":{"estimated_cycles":"1000"}}
}

%body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %f.3 = f32[8]{0:T(256)} fusion(%c), calls=%fused_computation, backend_config={"x":{"estimated_cycles":"100"}}
  %all_to_all.1 = bf16[1,4,8]{2,1,0:T(8,128)(2,1)S(1)} all-to-all(%f.3), channel_id=1
  %attention.12 = bf16[4]{0} custom-call(%f.3), custom_call_target="tpu_custom_call"
  %other = s32[4]{0} custom-call(%f.3), custom_call_target="AllocateBuffer"
  %conditional.9 = (f32[8]{0}) conditional(%p, %a, %b), branch_computations={%light, %heavy}
}

ENTRY %main (p: f32[8]) -> f32[] {
  %ag = (f32[2,8]{1,0}, bf16[16]{0}) all-gather-start(%p), channel_id=2
  %while.1 = (s32[], f32[8]{0}) while(%t), condition=%condition, body=%body
  %f.4 = f32[] fusion(%while.1), calls=%fused_computation, backend_config={"x":{"estimated_cycles":"7"}}
}
"""  # noqa: E501


def test_loops_multiply_and_a_branch_is_chosen():
    dear = cost(MODULE)
    assert dear.cycles == 7 + 3 * (100 + 1000)
    assert dear.counts == {"all-to-all": 3, "all-gather": 1}
    assert dear.moved == {"all-to-all": 3 * 64, "all-gather": 64 + 32}
    assert dear.kernels == {"attention": 3}


def test_size_of_a_shape_ignores_its_layout():
    assert size_of("bf16[1,4,8]{2,1,0:T(8,128)(2,1)S(1)}") == 64
    assert size_of("(f32[2,3]{1,0}, pred[5]{0}, s32[])") == 24 + 5 + 4
