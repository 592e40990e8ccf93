class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "bf16[64, 128]", primals_2: "bf16[128]", primals_3: "bf16[128, 256]", primals_4: "bf16[128, 256]", primals_5: "bf16[256, 128]"):
        # Annotation: {'stage': 'norm'} File: triton_side/blocks/swiglu_mlp.py:24 in apply, code: x_fp32 = x.float()
        convert_element_type: "f32[64, 128]" = torch.ops.prims.convert_element_type.default(primals_1, torch.float32)

        # Annotation: {'stage': 'norm'} File: triton_side/blocks/swiglu_mlp.py:25 in apply, code: square_mean = (x_fp32 * x_fp32).mean(dim=-1, keepdim=True)
        mul: "f32[64, 128]" = torch.ops.aten.mul.Tensor(convert_element_type, convert_element_type)
        mean: "f32[64, 1]" = torch.ops.aten.mean.dim(mul, [-1], True);  mul = None

        # Annotation: {'stage': 'norm'} File: triton_side/blocks/swiglu_mlp.py:26 in apply, code: h = (x_fp32 * torch.rsqrt(square_mean + eps)).to(x.dtype) * inputs["norm_weight"]
        add: "f32[64, 1]" = torch.ops.aten.add.Tensor(mean, 1e-06);  mean = None
        rsqrt: "f32[64, 1]" = torch.ops.aten.rsqrt.default(add);  add = None
        mul_1: "f32[64, 128]" = torch.ops.aten.mul.Tensor(convert_element_type, rsqrt);  convert_element_type = None
        convert_element_type_1: "bf16[64, 128]" = torch.ops.prims.convert_element_type.default(mul_1, torch.bfloat16);  mul_1 = None
        mul_2: "bf16[64, 128]" = torch.ops.aten.mul.Tensor(convert_element_type_1, primals_2);  convert_element_type_1 = None

        # Annotation: {'stage': 'gate'} File: triton_side/blocks/swiglu_mlp.py:28 in apply, code: gate = h @ inputs["gate_weight"]
        mm: "bf16[64, 256]" = torch.ops.aten.mm.default(mul_2, primals_3)

        # Annotation: {'stage': 'up'} File: triton_side/blocks/swiglu_mlp.py:30 in apply, code: up = h @ inputs["up_weight"]
        mm_1: "bf16[64, 256]" = torch.ops.aten.mm.default(mul_2, primals_4)

        # Annotation: {'stage': 'act'} File: triton_side/blocks/swiglu_mlp.py:32 in apply, code: activated = gate * torch.sigmoid(gate) * up
        sigmoid: "bf16[64, 256]" = torch.ops.aten.sigmoid.default(mm)
        mul_3: "bf16[64, 256]" = torch.ops.aten.mul.Tensor(mm, sigmoid);  sigmoid = None
        mul_4: "bf16[64, 256]" = torch.ops.aten.mul.Tensor(mul_3, mm_1);  mul_3 = None

        # Annotation: {'stage': 'residual'} File: triton_side/blocks/swiglu_mlp.py:36 in apply, code: y = x + down
        addmm_default: "bf16[64, 128]" = torch.ops.aten.addmm.default(primals_1, mul_4, primals_5)

        # Annotation: {'stage': 'down'} File: triton_side/blocks/swiglu_mlp.py:34 in apply, code: down = activated @ inputs["down_weight"]
        permute: "bf16[256, 64]" = torch.ops.aten.permute.default(mul_4, [1, 0]);  mul_4 = None
        permute_1: "bf16[128, 256]" = torch.ops.aten.permute.default(primals_5, [1, 0]);  primals_5 = None

        # Annotation: {'stage': 'up'} File: triton_side/blocks/swiglu_mlp.py:30 in apply, code: up = h @ inputs["up_weight"]
        permute_2: "bf16[128, 64]" = torch.ops.aten.permute.default(mul_2, [1, 0]);  mul_2 = None
        permute_3: "bf16[256, 128]" = torch.ops.aten.permute.default(primals_4, [1, 0]);  primals_4 = None

        # Annotation: {'stage': 'gate'} File: triton_side/blocks/swiglu_mlp.py:28 in apply, code: gate = h @ inputs["gate_weight"]
        permute_5: "bf16[256, 128]" = torch.ops.aten.permute.default(primals_3, [1, 0]);  primals_3 = None
        return (addmm_default, primals_1, primals_2, rsqrt, mm, mm_1, permute, permute_1, permute_2, permute_3, permute_5)
