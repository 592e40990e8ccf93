"""Temporary: sweeps of products."""
import itertools, multiprocessing, os, sys, time, functools
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch, triton
from triton.testing import do_bench
from triton_side.kernels import matmul, matmul_fp8, moe_routing, embedding, linear_cross_entropy as lce
from triton_side.kernels.shared import grouped_product as gp, grouped_gradient as gg
from triton_side.kernels.shared.matmul_tiles import MatmulConfig, programs_for_output
from triton_side.kernels.shared.launch import cdiv
from triton_side.kernels.shared.tiles import provide_descriptor_memory
M = MatmulConfig
def normal(*s, dtype=torch.bfloat16): return torch.randn(s, device="cuda", dtype=torch.bfloat16).to(dtype)

def skinny_in(k, n, fp8):
    if fp8:
        a, b = normal(16, k).to(torch.float8_e4m3fn), normal(n, k).to(torch.float8_e4m3fn).T
    else: a, b = normal(16, k), normal(k, n)
    return a, b, torch.ones((), device="cuda")
def skinny_call(g, c):
    a, b, one = g
    if a.dtype != torch.bfloat16: return matmul_fp8.launch_fp8(a, b, one, one, c)
    return matmul.launch_matmul(a, b, c)
def fp8_in(m, k, n):
    a, b = (normal(r, k).mul_(8).to(torch.float8_e4m3fn) for r in (m, n))
    one = torch.full((), 0.01, device="cuda")
    return a, b.T, one, one
def fp8_call(g, c):
    config, chunk = c
    return matmul_fp8.launch_fp8(*g, config, chunk)
P = lambda *a: matmul.pointer_config(*a)
SK = [P(16,128,128,4,5), P(16,128,64,4,8), P(16,64,256,4,5), P(16,64,128,4,5), P(16,64,128,4,8), P(16,64,64,4,8)]
SKF = [P(16,128,256,4,5), P(16,64,256,4,5), P(16,64,512,4,5), P(16,128,128,4,8)]
F4, F3 = M(128,256,128,8,4,16), M(128,256,128,8,3,16)
T, W, H, E = 4096, 2048, 3584, 8
def moe_in():
    torch.manual_seed(0)
    x, router = normal(T, W), normal(E, W)
    x += (torch.linspace(1, 0, E, device="cuda") @ router.float() / W).bfloat16()
    r, _ = moe_routing.route_tokens(x, router, 2, save=False)
    S = len(r.rows)
    return dict(x=x, rows=r.rows, off=r.offsets, xs=x[r.rows.long()].contiguous(), g=normal(S, H), g2=normal(S, H), dy=normal(S, W),
        wg=normal(E, W, H), wu=normal(E, W, H), wd=normal(E, H, W))
GU = [M(128,128,64,8,3,8), M(128,128,64,8,4,8), M(128,128,64,8,4,16), M(128,128,64,8,4,32), M(128,64,64,4,3,16,programs=2)]
D = [M(128,256,64,8,3,16), M(128,256,64,8,4,16), M(256,128,64,8,3,16), M(256,128,64,8,4,16), M(128,128,64,4,3,16,programs=2), M(128,128,64,4,3,8,programs=2)]
def lce_in():
    h, w = normal(2048, 4096), normal(128256, 4096) * 0.0156
    lab = torch.randint(0, 128256, (2048,), device="cuda", dtype=torch.int32)
    return dict(h=h, w=w, lab=lab, logits=normal(1024, 128256), losses=torch.empty(2048, device="cuda"), st=torch.ones(2, 1024, device="cuda"), one=torch.ones((), device="cuda"),
       dw=torch.zeros_like(w), dh=torch.empty_like(h))
def stat(g, c, save):
    n = 1024
    lce.launch_statistics(g["h"][:n], g["w"], g["lab"][:n], g["losses"][:n], .1, 1e-4, lambda *a: c, (g["logits"], g["st"][0], g["st"][1]) if save else None)
def mm(g, which, c):
    h, w, lo = g["h"][:1024], g["w"], g["logits"]
    if which == "dh": matmul.launch_matmul(lo, w, c, out=g["dh"][:1024], scale=g["one"])
    if which == "dw": matmul.launch_matmul(lo.T, h, c, out=g["dw"], scale=g["one"])
    if which == "dw+": matmul.launch_matmul(lo.T, h, c, g["dw"], out=g["dw"], scale=g["one"])

K = {}
for name, (k, n, f) in {"matmul": (4096, 14336, 0), "linear": (4096, 4096, 0), "linear_gelu": (4096, 16384, 0), "linear_residual": (14336, 4096, 0), "fp8": (4096, 14336, 1)}.items():
    peer = {"torch.mm": lambda g: torch.mm(g[0], g[1])} if not f else {"_scaled_mm": lambda g: torch._scaled_mm(g[0], g[1], scale_a=g[2], scale_b=g[2], out_dtype=torch.bfloat16, use_fast_accum=False)}
    K["skinny " + name] = (functools.partial(skinny_in, k, n, f), skinny_call, SKF if f else SK, (k * n * (1 if f else 2), "TB/s"), peer)
K["skinny dx"] = (lambda: (normal(16, 14336), normal(4096, 14336).T, 0), skinny_call, [SK[2], SK[4]], (4096 * 14336 * 2, "TB/s"), {"torch.mm": lambda g: torch.mm(g[0], g[1])})
for name, s, cc in (("square", (8192, 8192, 8192), [(F4, 4096), (F3, 4096), (F3, 2048), (F4, 2048), (F4, 8192)]), ("llama", (8192, 4096, 14336), [(F4, 4096), (F4, 2048)])):
    K["fp8 " + name] = (functools.partial(fp8_in, *s), fp8_call, cc, (2 * s[0] * s[1] * s[2], "TF/s"), {
        f"_scaled_mm fast={fa}": (lambda g, fa=fa: torch._scaled_mm(g[0], g[1], scale_a=g[2], scale_b=g[3], out_dtype=torch.bfloat16, use_fast_accum=fa)) for fa in (False, True)})
for save in (False, True):
    K[f"grouped gate+up save={save}"] = (moe_in, lambda g, c, save=save: gp.launch_gate_up(g["xs"], None, g["wg"], g["wu"], g["off"], c, save), GU[1:3] if save else GU, (8 * T * W * H, "TF/s"), {})
L = (2 * 1024 * 4096 * 128256, "TF/s")
K["lce statistics+logits"] = (lce_in, lambda g, c: stat(g, c, True), D[:1] + D[2:5], L, {"torch.mm": lambda g: torch.mm(g["h"][:1024], g["w"].T, out=g["logits"])})
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
def tag(c):
    if isinstance(c, tuple) and isinstance(c[0], MatmulConfig): return tag(c[0]) + f" chunk {c[1]}"
    if isinstance(c, MatmulConfig): return f"{c.block_m}x{c.block_n}x{c.block_k} w{c.num_warps} s{c.num_stages} g{c.group_m} p{c.programs}"
    return str(c)
def main():
    names = [n for n in K if not sys.argv[1:] or any(n.startswith(a) for a in sys.argv[1:])]
    start = time.time()
    work, seen = [], set()
    for n in names:
        todo = []
        for i, c in enumerate(K[n][2]):
            key = ("skinny bf16" if n.startswith("skinny") and "fp8" not in n and "dx" not in n else "fp8" if n.startswith("fp8") else n, tag(c))
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
    print(f"total {time.time() - start:.0f} s")
if __name__ == "__main__": main()
