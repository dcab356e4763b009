"""The Triton kernels compiled ahead of time for A100 (sm_80) and H100/H200 (sm_90); no GPU needed.

The interpreter accepts code that the compiler refuses, and neither shows a register spill or a loop
that lost its tensor cores. Triton's compiler and the ptxas it ships with do.
"""

import os
import re

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this process interprets", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kernels import logprob  # noqa: E402

try:
    PTXAS = triton.knobs.nvidia.ptxas.path
except RuntimeError as error:
    pytest.skip(f"no ptxas: {error}", allow_module_level=True)

CASES = [
    # kernel, row of the table, GPU architecture, arguments that are None or 1
    ("_forward", "sm90", 90, {"bias": None}),
    ("_forward", "sm80", 80, {"bias": None}),
    ("_forward", "fp32", 90, {"bias": None}),
    ("_forward", "sm90", 90, {"M": 1, "splits": 1}),
    ("_dlogits", "sm90", 90, {"bias": None}),
    ("_dlogits", "sm80", 80, {"bias": None}),
    ("_dlogits", "fp32", 90, {"bias": None}),
    ("_dlogits", "sm90", 90, {"M": 1, "slope": None}),
]


def compile_kernel(name, key, arch, fixed):
    """The compiled kernel as a launch at V, D divisible by 16 would make it."""
    BM, BV, BD, warps, stages, descriptor = logprob.BLOCKS[key]
    kernel, number = getattr(logprob, name), "fp32" if key == "fp32" else "bf16"
    constants = dict(BM=BM, BV=BV, BD=BD, GROUP=logprob.GROUP, DESCRIPTOR=descriptor) | fixed
    types = dict.fromkeys(kernel.arg_names, "*fp32")
    types |= dict.fromkeys(("M", "V", "D", "splits"), "i32")
    types |= {"scale": "fp32", "targets": "*i64", "dz": "*" + number}
    types |= {"h": "*" + number, "w": "*" + number}
    if descriptor:
        types |= {
            "h": f"tensordesc<{number}[{BM}, {BD}]>",
            "w": f"tensordesc<{number}[{BV}, {BD}]>",
        }
    types |= dict.fromkeys(constants, "constexpr")
    signature = {arg: types[arg] for arg in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (arg, kind) in enumerate(signature.items())
        if kind.startswith("*") or (arg in ("V", "D") and kind == "i32")
    }
    used = {arg: value for arg, value in constants.items() if arg in signature}
    return triton.compile(
        ASTSource(kernel, signature, used, aligned),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": warps, "num_stages": stages},
    )


@pytest.mark.parametrize("name, key, arch, fixed", CASES)
def test_kernel_uses_the_tensor_cores_without_spilling(
    name, key, arch, fixed, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # a cached kernel has no ptxas log
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    compiled = compile_kernel(name, key, arch, fixed)
    log = capfd.readouterr().out
    ptx = compiled.asm["ptx"]
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    spilled = sum(map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill", log).groups()))
    print(f"{registers} registers, {spilled} B spilled, {compiled.metadata.shared} B shared")
    assert registers <= 255 and spilled < 256
    assert compiled.metadata.shared < 227 * 1024
    assert (
        "serialized" not in log
    )  # ptxas warns so when the matrix instructions wait for each other
    instructions = {"sm90": "wgmma.mma_async", "sm80": "mma.sync", "fp32": "fma.rn.f32"}
    assert ptx.count(instructions[key]) >= 4
    assert ("cp.async.bulk.tensor" in ptx) == (key == "sm90")
    assert "atom." not in ptx  # results do not depend on the order of the programs
