"""A pretended GPU for machines without one: CPU tensors of a class of their own.

They say that their device is cuda:0, and an operation that brings them together with tensors of the
CPU fails where CUDA would fail. Values are computed on the CPU; there is no memory, stream or
kernel. Backward is not watched: autograd hands out tensors of the plain class.
"""

import contextlib
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
MAY_MIX = {Tensor.copy_, Tensor.type_as, Tensor.to, Tensor.data.__set__}


class OnGpu(Tensor):
    """A tensor that says it is on the GPU."""


def up(x):
    return x.as_subclass(OnGpu) if isinstance(x, Tensor) and not isinstance(x, OnGpu) else x


def down(x):
    return x.as_subclass(Tensor) if isinstance(x, OnGpu) else x


def to_gpu(device):
    """Whether a device argument means the GPU."""
    return isinstance(device, int) or torch.device(device).type == "cuda"


def may_mix(function, args):
    """What CUDA allows: indices may lie on the CPU too, and slices may be filled from there."""
    if function is Tensor.__getitem__:
        return isinstance(args[0], OnGpu)
    if function is Tensor.__setitem__:
        return not any(isinstance(i, Tensor | list) for i in tree_leaves(args[1]))
    return function in MAY_MIX


class PretendedGpu(TorchFunctionMode):
    """Within, device="cuda" works."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", str(function))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        here = [x for x in tensors if isinstance(x, OnGpu)]
        others = [x for x in tensors if not isinstance(x, OnGpu)]
        if function == Tensor.device.__get__:
            return GPU if here else CPU
        if function == Tensor.is_cuda.__get__:
            return bool(here)
        if function is torch._has_compatible_shallow_copy_type:
            return not (here and others)  # Module.to makes new parameters, which know their class
        if function is Tensor.cpu:
            return down(args[0])
        if function is Tensor.numpy and here:
            raise TypeError("numpy() of a tensor on the GPU")
        if here and any(x.dim() for x in others) and not may_mix(function, args):
            raise RuntimeError(f"{name}: tensors on two devices")
        target = bool(here)
        if function is Tensor.to:
            args = list(args)
            for i, x in enumerate(args[1:], 1):
                if isinstance(x, Tensor):
                    target = isinstance(x, OnGpu)
                elif isinstance(x, str | torch.device):
                    target, args[i] = to_gpu(x), CPU
        if kwargs.get("device") is not None:
            target, kwargs["device"] = to_gpu(kwargs["device"]), CPU
        if "out_dtype" in kwargs:  # products with float32 sums, which a CPU does not have
            wide = kwargs.pop("out_dtype")
            args = [x.to(wide) if isinstance(x, Tensor) else x for x in args]
        return tree_map(up if target else down, function(*args, **kwargs))


@contextlib.contextmanager
def pretended_gpu(monkeypatch):
    """`torch.cuda` says that there is one, old enough to have no Triton."""
    stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda other: None)

    def nothing(*args):
        pass

    facts = dict(
        mem_get_info=lambda device: (10**9, 10**9), empty_cache=nothing, synchronize=nothing,
        is_available=lambda: True, current_device=lambda: 0, current_stream=lambda: stream,
        Stream=lambda: stream, stream=lambda stream: PretendedGpu(),  # a mode is of one thread
        device_count=lambda: 1, set_device=nothing,
        get_device_capability=lambda device: (7, 0),
        get_device_properties=lambda device: SimpleNamespace(total_memory=10**9),
    )  # fmt: skip
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, value)
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with PretendedGpu():
            yield GPU
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
