"""Temporary: sweeps of products."""
import itertools, multiprocessing, os, sys, time, functools
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch, triton
from triton.testing import do_bench
from triton_side.kernels import matmul, moe_routing, embedding, linear_cross_entropy as lce
from triton_side.kernels.shared import grouped_product as gp, grouped_gradient as gg
from triton_side.kernels.shared.matmul_tiles import MatmulConfig, programs_for_output
from triton_side.kernels.shared.launch import cdiv
from triton_side.kernels.shared.tiles import provide_descriptor_memory
from triton_side.kernels.shared.skinny_product import skinny_kernel
from tools.benchmarks.fp8k import fp8_kernel
M = MatmulConfig
def normal(*s, dtype=torch.bfloat16): return torch.randn(s, device="cuda", dtype=torch.bfloat16).to(dtype)

def skinny_in(k, n, fp8):
    if fp8:
        a, b = normal(16, k).to(torch.float8_e4m3fn), normal(n, k).to(torch.float8_e4m3fn).T
    else: a, b = normal(16, k), normal(k, n)
    one = torch.ones((), device="cuda")
    return a, b, torch.empty(16, n, device="cuda", dtype=torch.bfloat16), torch.empty(32 * 16 * n, device="cuda"), torch.zeros(4096, device="cuda", dtype=torch.int32), one
def skinny_call(g, c):
    bm, bn, bk, w, s, splits, st = c
    a, b, out, part, arr, one = g
    (m, k), n = a.shape, b.shape[1]
    sc = one if a.dtype != torch.bfloat16 else None
    skinny_kernel[(cdiv(n, bn), splits)](a, b, sc, sc, out, part if splits > 1 else None, arr if splits > 1 else None, m, n, k, *a.stride(), *b.stride(),
        BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, SPLITS=splits, STAGGER=st, PRECISION="ieee", num_warps=w, num_stages=s)
    return out
def skinny_cands(k, n, fp8):
    e = 1 if fp8 else 2
    out = []
    for bn, bk, splits, st in [*itertools.product((32, 64, 128), (64, 128, 256), (1,), (0, 4)), *itertools.product((64, 128, 256), (64, 128), (2, 4, 8, 16), (0,))]:
        bk = bk * 2 // e
        programs = cdiv(n, bn) * splits
        if programs < 60 or programs > 1100 or bn * bk > 16384 * 2 // e: continue
        per = max(1, cdiv(programs, 132))
        step = (bn + 16) * bk * e
        s = max(3, min(8, (200 // min(per, 3)) * 1024 // step))
        if s * step > 220 * 1024: continue
        w = 4 if bn * bk * e <= 32768 else 8
        out.append((16, bn, bk, w, s, splits, st))
        if fp8 and splits == 1 and st and bn > 32: out.append((64, bn, bk, w, min(s, 220 * 1024 // ((bn + 64) * bk)), splits, st))
    return out

def fp8_in(m, k, n):
    a, b = (normal(r, k).mul_(8).to(torch.float8_e4m3fn) for r in (m, n))
    one = torch.full((), 0.01, device="cuda")
    return a, b.T, one, one, torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
def fp8_call(g, c):
    a, b, s1, s2, out = g
    (m, k), n = a.shape, b.shape[1]
    (bm, bn, bk, w, s, halves, fast, flat, per, gm) = c
    provide_descriptor_memory(a.device)
    grid = min(cdiv(m, bm) * cdiv(n, bn * halves), 132 * per)
    fp8_kernel[(grid,)](a, b, s1, s2, out, m, n, k, *a.stride(), *b.stride(), BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, GROUP_M=gm, HALVES=halves, FAST=fast, FLATTEN=flat, num_warps=w, num_stages=s)
    return out
FP8 = [(128,128,128,8,4,2,False,True,1,16),(128,128,128,8,4,2,False,False,1,16),(128,128,128,8,3,2,False,True,1,8),(128,128,128,8,4,1,False,True,1,16),
  (64,128,128,4,3,1,False,False,3,16),(64,128,128,4,3,1,False,True,2,16),(64,128,128,4,4,1,False,False,2,16),(128,128,256,8,3,1,False,True,1,16),(128,128,128,8,5,1,False,False,1,16),
  (128,256,128,8,4,1,True,True,1,16),(128,256,128,8,3,1,True,True,1,8),(128,256,128,8,4,1,True,False,1,16)]

T, W, H, E = 4096, 2048, 3584, 8
def moe_in():
    torch.manual_seed(0)
    x, router = normal(T, W), normal(E, W)
    x += (torch.linspace(1, 0, E, device="cuda") @ router.float() / W).bfloat16()
    r, _ = moe_routing.route_tokens(x, router, 2, save=False)
    S = len(r.rows)
    return dict(x=x, rows=r.rows, off=r.offsets, xs=x[r.rows.long()].contiguous(), g=normal(S, H), g2=normal(S, H), dy=normal(S, W),
        wg=normal(E, W, H), wu=normal(E, W, H), wd=normal(E, H, W))
G = [M(128,256,64,8,3,8), M(128,256,64,8,3,16), M(128,256,64,8,3,32), M(128,256,64,8,4,16), M(128,128,64,4,3,16,programs=2), M(128,128,64,4,3,32,programs=2), M(256,128,64,8,3,8)]
GROUPED = {
  "grouped down NN": lambda g, c: gp.launch_grouped_product(g["g"], None, g["wd"], g["off"], len(g["rows"]), c),
  "grouped gate NN": lambda g, c: gp.launch_grouped_product(g["xs"], None, g["wg"], g["off"], len(g["rows"]), c),
  "grouped gated NN": lambda g, c: gp.launch_grouped_gated(g["xs"], None, g["wu"], g["g"], g["off"], c, False),
  "grouped gated save": lambda g, c: gp.launch_grouped_gated(g["xs"], None, g["wu"], g["g"], g["off"], c, True),
  "grouped dout NT": lambda g, c: gp.launch_grouped_product(g["dy"], None, g["wd"].mT, g["off"], len(g["rows"]), c),
  "grouped dx pair NT": lambda g, c: gp.launch_grouped_product(g["g"], None, g["wg"].mT, g["off"], len(g["rows"]), c, second=(g["g2"], g["wu"].mT)),
  "grouped dx single NT": lambda g, c: gp.launch_grouped_product(g["g"], None, g["wg"].mT, g["off"], len(g["rows"]), c),
}
GRAD = [M(128,256,64,8,3,16), M(128,256,64,8,4,8), M(128,128,64,4,3,8,programs=2), M(128,128,64,4,3,16,programs=2), M(128,128,32,4,6,16,programs=2)]
GRAD2 = [M(128,128,64,8,4,16), M(128,128,64,8,4,8)]
def gated_in(): return normal(2048, 4096), normal(4096, 14336), normal(2048, 14336)
D = [M(128,256,64,8,3,8), M(128,256,64,8,3,16), M(128,256,64,8,3,32)]
def lce_in():
    h, w = normal(2048, 4096), normal(128256, 4096) * 0.0156
    lab = torch.randint(0, 128256, (2048,), device="cuda", dtype=torch.int32)
    return dict(h=h, w=w, lab=lab, logits=normal(1024, 128256), losses=torch.empty(2048, device="cuda"), st=torch.ones(2, 1024, device="cuda"), one=torch.ones((), device="cuda"),
       dw=torch.zeros_like(w), dh=torch.empty_like(h))
def stat(g, c, save):
    n = 1024
    lce._launch_statistics(g["h"][:n], g["w"], g["lab"][:n], g["losses"][:n], .1, 1e-4, lambda *a: c, (g["logits"], g["st"][0], g["st"][1]) if save else None)
def dlog(g, c):
    b, w = c
    lce.dlogits_kernel[(cdiv(128256, b), 1024)](g["logits"], g["lab"], g["st"][0], g["st"][1], 128256, 128256, .1, 1e-4, IGNORED=-100, COLUMNS=b, num_warps=w)
def mm(g, which, c):
    h, w, lo = g["h"][:1024], g["w"], g["logits"]
    if which == "dh": matmul.launch_matmul(lo, w, c, out=g["dh"][:1024], scale=g["one"])
    if which == "dw": matmul.launch_matmul(lo.T, h, c, out=g["dw"], scale=g["one"])
    if which == "dw+": matmul.launch_matmul(lo.T, h, c, g["dw"], out=g["dw"], scale=g["one"])

K = {}
for name, (k, n, f) in {"matmul": (4096, 14336, 0), "linear": (4096, 4096, 0), "linear_gelu": (4096, 16384, 0), "linear_residual": (14336, 4096, 0), "fp8": (4096, 14336, 1)}.items():
    peer = {"torch.mm": lambda g: torch.mm(g[0], g[1])} if not f else {"_scaled_mm": lambda g: torch._scaled_mm(g[0], g[1], scale_a=g[5], scale_b=g[5], out_dtype=torch.bfloat16, use_fast_accum=False)}
    old = lambda g, f=f: matmul.launch_matmul(g[0], g[1], matmul.few_rows_config(2)) if not f else None
    K["skinny " + name] = (functools.partial(skinny_in, k, n, f), skinny_call, skinny_cands(k, n, f), (k * n * (1 if f else 2), "TB/s"), peer | ({} if f else {"old": old}))
for name, s in {"square": (8192, 8192, 8192), "llama": (8192, 4096, 14336)}.items():
    K["fp8 " + name] = (functools.partial(fp8_in, *s), fp8_call, FP8, (2 * s[0] * s[1] * s[2], "TF/s"), {
        f"_scaled_mm fast={fa}": (lambda g, fa=fa: torch._scaled_mm(g[0], g[1], scale_a=g[2], scale_b=g[3], out_dtype=torch.bfloat16, use_fast_accum=fa)) for fa in (False, True)})
off = lambda g: g["off"][1:].contiguous()
PEER = {"grouped down NN": lambda g: torch._grouped_mm(g["g"], g["wd"], offs=off(g)), "grouped gate NN": lambda g: torch._grouped_mm(g["xs"], g["wg"], offs=off(g)), "grouped dout NT": lambda g: torch._grouped_mm(g["dy"], g["wd"].mT, offs=off(g))}
for name, call in GROUPED.items():
    K[name] = (moe_in, call, G[:5] if "pair" in name else G, (2 * 2 * T * W * H * (2 if "pair" in name else 1), "TF/s"), {"_grouped_mm": PEER[name]} if name in PEER else {})
K["grad down"] = (moe_in, lambda g, c: gg.launch_group_gradients(g["g"], g["dy"], None, g["off"], c, a_gathered=False), GRAD, (4 * T * W * H, "TF/s"), {"_grouped_mm": lambda g: torch._grouped_mm(g["g"].T, g["dy"], offs=off(g))})
K["grad gate"] = (moe_in, lambda g, c: gg.launch_group_gradients(g["xs"], g["g"], None, g["off"], c, a_gathered=False), GRAD, (4 * T * W * H, "TF/s"), {})
K["grad gate+up"] = (moe_in, lambda g, c: gg.launch_group_gradients(g["xs"], g["g"], None, g["off"], c, a_gathered=True, b2=g["g2"]), GRAD2, (8 * T * W * H, "TF/s"), {})
K["dense gated"] = (gated_in, lambda g, c: matmul.launch_gated(g[0], g[1], g[2], c, False), D, (2 * 2048 * 4096 * 14336, "TF/s"), {"torch.mm": lambda g: torch.mm(g[0], g[1])})
K["dense gated save"] = (gated_in, lambda g, c: matmul.launch_gated(g[0], g[1], g[2], c, True), D, (2 * 2048 * 4096 * 14336, "TF/s"), {})
L = (2 * 1024 * 4096 * 128256, "TF/s")
K["lce statistics"] = (lce_in, lambda g, c: stat(g, c, False), D[1:2], L, {})
K["lce statistics+logits"] = (lce_in, lambda g, c: stat(g, c, True), D, L, {"torch.mm": lambda g: torch.mm(g["h"][:1024], g["w"].T, out=g["logits"])})
K["lce dlogits"] = (lce_in, dlog, [(2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16)], (4 * 1024 * 128256, "TB/s"), {})
K["lce dh"] = (lce_in, lambda g, c: mm(g, "dh", c), D[:2], L, {"torch.mm": lambda g: torch.mm(g["logits"], g["w"], out=g["dh"][:1024])})
K["lce dw"] = (lce_in, lambda g, c: mm(g, "dw", c), D, L, {"torch.mm": lambda g: torch.mm(g["logits"].T, g["h"][:1024], out=g["dw"])})
K["lce dw+"] = (lce_in, lambda g, c: mm(g, "dw+", c), D, L, {"torch.addmm": lambda g: g["dw"].addmm_(g["logits"].T, g["h"][:1024])})

def once(work):
    name, indices = work
    prepare, call, cands, *_ = K[name]
    ok = []
    try: g = prepare()
    except Exception as e: return [(name, i, f"prepare {e}"[:200]) for i in indices]
    for i in indices:
        try:
            call(g, cands[i]); torch.cuda.synchronize(); ok.append((name, i, ""))
        except Exception as e: ok.append((name, i, f"{type(e).__name__}: {str(e)[-120:]}"))
    return ok
def whole():
    from triton_side.kernels import swiglu_mlp, moe
    torch.cuda.empty_cache()
    h, w = normal(300, 512).requires_grad_(), (normal(5000, 512) * 0.04).requires_grad_()
    lab = torch.randint(0, 5000, (300,), device="cuda", dtype=torch.int32); lab[::7] = -100
    loss = lce.linear_cross_entropy(h, w, lab, 0.0, 0.0)
    ref = torch.nn.functional.cross_entropy((h.float() @ w.float().T), lab.long())
    got, want = (torch.autograd.grad(x, (h, w), torch.tensor(2.0, device="cuda")) for x in (loss, ref))
    print("lce check", loss.item(), ref.item(), [((x - y).abs().max() / y.float().pow(2).mean().sqrt()).item() for x, y in zip(got, want)])
    w = normal(128256, 4096) * 0.0156
    for t in (2048, 8192):
        h, lab = normal(t, 4096) * 4, torch.randint(0, 128256, (t,), device="cuda", dtype=torch.int32)
        ms = do_bench(lambda: lce.training_pass(h, w, lab, 0.1, 1e-4), warmup=20, rep=100, return_mode="median")
        print(f"lce whole {t}: {ms * 1e3:.0f} us")
    del w
    x, nw, g, u, d = normal(2048, 4096), normal(4096), normal(4096, 14336) * .016, normal(4096, 14336) * .016, normal(14336, 4096) * .008
    print(f"swiglu fwd {do_bench(lambda: swiglu_mlp.swiglu_mlp(x, nw, g, u, d, 1e-5), warmup=10, rep=50, return_mode='median') * 1e3:.0f} us")
    m = moe_in()
    f = lambda: moe.moe(m["x"], normal_router, m["wg"], m["wu"], m["wd"], 2)
    normal_router = normal(E, W)
    print(f"moe fwd {do_bench(f, warmup=10, rep=50, return_mode='median') * 1e3:.0f} us")
def tag(c):
    if isinstance(c, MatmulConfig): return f"{c.block_m}x{c.block_n}x{c.block_k} w{c.num_warps} s{c.num_stages} g{c.group_m} p{c.programs}"
    return str(c)
def main():
    names = [n for n in K if not sys.argv[1:] or any(n.startswith(a) for a in sys.argv[1:])]
    start = time.time()
    work, seen = [], set()
    for n in names:
        todo = []
        for i, c in enumerate(K[n][2]):
            key = ("skinny bf16" if n.startswith("skinny") and "fp8" not in n else "fp8" if n.startswith("fp8") else n, tag(c))
            if key not in seen: seen.add(key); todo.append(i)
        work += [(n, todo[i:i + 4]) for i in range(0, len(todo), 4)]
    bad = {}
    with ProcessPoolExecutor(min(16, os.cpu_count()), multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(once, work):
            for n, i, why in found:
                if why: bad[n, i] = why
    print(f"compiled {sum(len(w[1]) for w in work)} in {time.time() - start:.0f} s; failed {len(bad)}", flush=True)
    for (n, i), why in list(bad.items())[:6]: print("  ", n, tag(K[n][2][i]), why)
    for n in names:
        prepare, call, cands, (amount, unit), peers = K[n]
        torch.cuda.empty_cache()
        g = prepare()
        rows = []
        for p, f in peers.items():
            try: rows.append((do_bench(lambda: f(g), warmup=8, rep=30, return_mode="median"), "PEER " + p, ""))
            except Exception as e: print(p, str(e)[:100])
        ref = None
        if n.startswith(("skinny", "fp8")):
            a, b = g[0][:512].float(), g[1].float()
            ref = a @ b * (g[2] * g[3] if n.startswith("fp8") else 1)
        for i, c in enumerate(cands):
            if (n, i) in bad: continue
            try:
                note = ""
                if ref is not None:
                    out = call(g, c); out = call(g, c)
                    note = "err %.4f" % ((out[:512].float() - ref).abs().max() / ref.pow(2).mean().sqrt()).item()
                t = do_bench(lambda: call(g, c), warmup=5, rep=20, return_mode="median")
                rows.append((t, tag(c), note))
            except Exception as e: print("  ", n, tag(c), type(e).__name__, str(e)[-100:])
        rows.sort()
        keep = [r for j, r in enumerate(rows) if j < (7 if n.startswith(("skinny", "fp8")) else 4) or r[1].startswith("PEER") or (n.startswith("fp8 sq"))]
        print(f"{n}:", flush=True)
        for t, c, note in keep: print(f"  {t*1e3:8.1f} us {amount/t/1e9:7.1f} {unit} {c} {note}" if unit == "TF/s" else f"  {t*1e3:8.1f} us {amount/t/1e9:7.2f} {unit} {c} {note}")
        del g
    if not sys.argv[1:]: whole()
    print(f"total {time.time() - start:.0f} s")
if __name__ == "__main__": main()
