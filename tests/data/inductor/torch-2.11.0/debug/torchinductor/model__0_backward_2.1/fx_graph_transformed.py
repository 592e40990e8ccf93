class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "bf16[64, 128]", primals_2: "bf16[128]", rsqrt: "f32[64, 1]", mm: "bf16[64, 256]", mm_1: "bf16[64, 256]", permute: "bf16[256, 64]", permute_1: "bf16[128, 256]", permute_2: "bf16[128, 64]", permute_3: "bf16[256, 128]", permute_5: "bf16[256, 128]", tangents_1: "bf16[64, 128]"):
        # Annotation: {'stage': 'down'} File: triton_side/blocks/swiglu_mlp.py:34 in apply, code: down = activated @ inputs["down_weight"]
        mm_3: "bf16[256, 128]" = torch.ops.aten.mm.default(permute, tangents_1);  permute = None
        mm_4: "bf16[64, 256]" = torch.ops.aten.mm.default(tangents_1, permute_1);  permute_1 = None

        # Annotation: {'stage': 'act'} File: triton_side/blocks/swiglu_mlp.py:32 in apply, code: activated = gate * torch.sigmoid(gate) * up
        sigmoid: "bf16[64, 256]" = torch.ops.aten.sigmoid.default(mm)
        mul_3: "bf16[64, 256]" = torch.ops.aten.mul.Tensor(mm, sigmoid)
        mul_5: "bf16[64, 256]" = torch.ops.aten.mul.Tensor(mm_4, mul_3);  mul_3 = None
        mul_6: "bf16[64, 256]" = torch.ops.aten.mul.Tensor(mm_4, mm_1);  mm_4 = mm_1 = None
        mul_7: "bf16[64, 256]" = torch.ops.aten.mul.Tensor(mul_6, mm);  mm = None
        mul_8: "bf16[64, 256]" = torch.ops.aten.mul.Tensor(mul_6, sigmoid);  mul_6 = None
        convert_element_type_12: "f32[64, 256]" = torch.ops.prims.convert_element_type.default(mul_7, torch.float32);  mul_7 = None
        convert_element_type_13: "f32[64, 256]" = torch.ops.prims.convert_element_type.default(sigmoid, torch.float32);  sigmoid = None
        sub: "f32[64, 256]" = torch.ops.aten.sub.Tensor(1, convert_element_type_13)
        mul_9: "f32[64, 256]" = torch.ops.aten.mul.Tensor(convert_element_type_13, sub);  convert_element_type_13 = sub = None
        mul_10: "f32[64, 256]" = torch.ops.aten.mul.Tensor(convert_element_type_12, mul_9);  convert_element_type_12 = mul_9 = None
        convert_element_type_14: "bf16[64, 256]" = torch.ops.prims.convert_element_type.default(mul_10, torch.bfloat16);  mul_10 = None

        # File: triton_side/blocks/swiglu_mlp.py:32 in apply, code: activated = gate * torch.sigmoid(gate) * up
        add_2: "bf16[64, 256]" = torch.ops.aten.add.Tensor(mul_8, convert_element_type_14);  mul_8 = convert_element_type_14 = None

        # Annotation: {'stage': 'up'} File: triton_side/blocks/swiglu_mlp.py:30 in apply, code: up = h @ inputs["up_weight"]
        mm_5: "bf16[128, 256]" = torch.ops.aten.mm.default(permute_2, mul_5)
        mm_6: "bf16[64, 128]" = torch.ops.aten.mm.default(mul_5, permute_3);  mul_5 = permute_3 = None

        # Annotation: {'stage': 'gate'} File: triton_side/blocks/swiglu_mlp.py:28 in apply, code: gate = h @ inputs["gate_weight"]
        mm_7: "bf16[128, 256]" = torch.ops.aten.mm.default(permute_2, add_2);  permute_2 = None
        mm_8: "bf16[64, 128]" = torch.ops.aten.mm.default(add_2, permute_5);  add_2 = permute_5 = None

        # File: triton_side/blocks/swiglu_mlp.py:28 in apply, code: gate = h @ inputs["gate_weight"]
        add_3: "bf16[64, 128]" = torch.ops.aten.add.Tensor(mm_6, mm_8);  mm_6 = mm_8 = None

        # Annotation: {'stage': 'norm'} File: triton_side/blocks/swiglu_mlp.py:24 in apply, code: x_fp32 = x.float()
        convert_element_type: "f32[64, 128]" = torch.ops.prims.convert_element_type.default(primals_1, torch.float32);  primals_1 = None

        # Annotation: {'stage': 'norm'} File: triton_side/blocks/swiglu_mlp.py:26 in apply, code: h = (x_fp32 * torch.rsqrt(square_mean + eps)).to(x.dtype) * inputs["norm_weight"]
        mul_1: "f32[64, 128]" = torch.ops.aten.mul.Tensor(convert_element_type, rsqrt)
        convert_element_type_1: "bf16[64, 128]" = torch.ops.prims.convert_element_type.default(mul_1, torch.bfloat16);  mul_1 = None
        mul_11: "bf16[64, 128]" = torch.ops.aten.mul.Tensor(add_3, convert_element_type_1);  convert_element_type_1 = None
        mul_12: "bf16[64, 128]" = torch.ops.aten.mul.Tensor(add_3, primals_2);  add_3 = primals_2 = None
        sum_1: "bf16[1, 128]" = torch.ops.aten.sum.dim_IntList(mul_11, [0], True);  mul_11 = None
        view: "bf16[128]" = torch.ops.aten.reshape.default(sum_1, [128]);  sum_1 = None
        convert_element_type_23: "f32[64, 128]" = torch.ops.prims.convert_element_type.default(mul_12, torch.float32);  mul_12 = None
        mul_13: "f32[64, 128]" = torch.ops.aten.mul.Tensor(convert_element_type_23, convert_element_type)
        mul_14: "f32[64, 128]" = torch.ops.aten.mul.Tensor(convert_element_type_23, rsqrt);  convert_element_type_23 = None
        sum_2: "f32[64, 1]" = torch.ops.aten.sum.dim_IntList(mul_13, [1], True);  mul_13 = None
        pow_1: "f32[64, 1]" = torch.ops.aten.pow.Tensor_Scalar(rsqrt, 3);  rsqrt = None
        mul_15: "f32[64, 1]" = torch.ops.aten.mul.Scalar(sum_2, -0.5);  sum_2 = None
        mul_16: "f32[64, 1]" = torch.ops.aten.mul.Tensor(mul_15, pow_1);  mul_15 = pow_1 = None

        # Annotation: {'stage': 'norm'} File: triton_side/blocks/swiglu_mlp.py:25 in apply, code: square_mean = (x_fp32 * x_fp32).mean(dim=-1, keepdim=True)
        expand: "f32[64, 128]" = torch.ops.aten.expand.default(mul_16, [64, 128]);  mul_16 = None
        div: "f32[64, 128]" = torch.ops.aten.div.Scalar(expand, 128);  expand = None
        mul_17: "f32[64, 128]" = torch.ops.aten.mul.Tensor(div, convert_element_type);  div = convert_element_type = None

        # File: triton_side/blocks/swiglu_mlp.py:25 in apply, code: square_mean = (x_fp32 * x_fp32).mean(dim=-1, keepdim=True)
        add_4: "f32[64, 128]" = torch.ops.aten.add.Tensor(mul_14, mul_17);  mul_14 = None
        add_5: "f32[64, 128]" = torch.ops.aten.add.Tensor(add_4, mul_17);  add_4 = mul_17 = None

        # Annotation: {'stage': 'norm'} File: triton_side/blocks/swiglu_mlp.py:24 in apply, code: x_fp32 = x.float()
        convert_element_type_24: "bf16[64, 128]" = torch.ops.prims.convert_element_type.default(add_5, torch.bfloat16);  add_5 = None

        # File: triton_side/blocks/swiglu_mlp.py:24 in apply, code: x_fp32 = x.float()
        add_6: "bf16[64, 128]" = torch.ops.aten.add.Tensor(tangents_1, convert_element_type_24);  tangents_1 = convert_element_type_24 = None
        return (add_6, view, mm_7, mm_5, mm_3)
