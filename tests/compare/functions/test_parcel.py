"""Pickles for the compiling process."""

from __future__ import annotations

import pickle
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from xlafuse.compare.functions.parcel import ArrayLike, NotSendable, pack, path_for, unpack


def itself(like: ArrayLike) -> ArrayLike:
    return like


def test_arrays_are_sent_without_data():
    big = np.ones((1 << 20,), np.float32)
    data = pack(({"x": big}, [big, 3, "mode", None]), arrays=False)
    assert len(data) < 2000
    like = ArrayLike("numpy", (1 << 20,), "float32")
    assert unpack(data, itself) == ({"x": like}, [like, 3, "mode", None])
    assert unpack(pack([like, like], arrays=False), itself) == [like, like]
    assert pickle.loads(pack({"a": 1}, arrays=False)) == {"a": 1}  # pickles need no unpack


def test_closed_over_arrays_are_sent_with_data():
    weights = np.arange(6.0)
    function = unpack(pack(lambda x: x + weights, arrays=True), itself)
    assert function(1).tolist() == [1, 2, 3, 4, 5, 6]


def test_importable_functions_are_sent_by_name():
    assert len(pack(_quantiles(), arrays=True)) < 100


def _quantiles():
    import statistics

    return statistics.quantiles


def test_functions_of_unimportable_modules_are_sent_by_value(tmp_path: Path):
    file = tmp_path / "made_up.py"
    file.write_text("def double(x):\n    return factor * x\nfactor = 2\n")
    module = types.ModuleType("made_up_by_a_test_runner")
    module.__file__ = str(file)
    exec(compile(file.read_text(), str(file), "exec"), vars(module))
    sys.modules[module.__name__] = module
    try:
        data = pack(module.double, arrays=True)
    finally:
        del sys.modules[module.__name__]
    (tmp_path / "parcel").write_bytes(data)
    program = f"import pickle; print(pickle.load(open({str(tmp_path / 'parcel')!r}, 'rb'))(21))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "42"


def test_an_unsendable_value_is_named():
    lock = __import__("threading").Lock()
    with pytest.raises(NotSendable, match="lock"):
        pack(lambda: lock, arrays=True)


def test_jitted_functions_keep_their_options():
    jax = pytest.importorskip("jax")

    def step(state, x, *, mode):
        return state + x if mode == "add" else state

    jitted = jax.jit(step, donate_argnums=0, static_argnames=("mode",))
    again = unpack(pack(jitted, arrays=True), itself)
    x = jax.ShapeDtypeStruct((4,), "float32")
    traced = again.trace(x, x, mode="add")
    assert [info.donated for info in jax.tree.leaves(traced.args_info)] == [True, False]


def test_jax_arrays_keys_and_tracers():
    jax = pytest.importorskip("jax")
    key = jax.random.key(0)
    assert unpack(pack([key, jax.numpy.ones((2,), "bfloat16")], arrays=False), itself) == [
        ArrayLike("jax", (), "key<fry>", is_key=True), ArrayLike("jax", (2,), "bfloat16"),
    ]
    with pytest.raises(NotSendable, match="outside jit"):
        jax.jit(lambda x: pack([x], arrays=False))(1.0)


def test_torch_modules_are_sent_without_weights_and_stay_tied():
    torch = pytest.importorskip("torch")
    first, second = torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)
    second.weight = first.weight
    data = pack(torch.nn.Sequential(first, second), arrays=False)
    assert len(data) < 10_000

    def meta(like: ArrayLike):
        made = torch.empty_strided(like.shape, like.stride, dtype=getattr(torch, like.dtype), device="meta")
        return torch.nn.Parameter(made) if like.is_parameter else made

    again = unpack(data, meta)
    assert again[0].weight is again[1].weight
    transposed = unpack(pack([torch.ones(3, 5).t()], arrays=False), itself)
    assert transposed == [ArrayLike("torch", (5, 3), "float32", (1, 5))]


def test_sparse_tensors_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(NotSendable, match="sparse"):
        pack([torch.eye(3).to_sparse()], arrays=False)


def test_a_closed_over_mesh_is_made_of_the_processs_devices():
    jax = pytest.importorskip("jax")
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("i",))
    got = unpack(pack(lambda: mesh, arrays=True), itself)()
    assert got.shape == mesh.shape and got.axis_types == mesh.axis_types
    (device,) = got.devices.flat
    assert device == jax.devices()[0]


def test_another_python_gets_no_library_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [str(tmp_path), str(tmp_path / "users.zip")]
    program = "import sys; print(*sys.path, sep='\\n')"
    bare = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    monkeypatch.setattr(sys, "path", [*own, *bare.stdout.split()])
    assert path_for(elsewhere=False) == tuple(sys.path)
    assert not [entry for entry in path_for(elsewhere=True) if "python3" in Path(entry).name or "lib-" in entry]
    assert path_for(elsewhere=True)[:2] == tuple(own)
