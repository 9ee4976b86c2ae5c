"""Pretended GPUs: the CUDA paths of the scripts, run completely on a CPU build of torch.

    import pretend
    pretend.install(devices=2)      # for good, in this process
    torch.ones(2, device="cuda:1")  # a pretend.Gpu, which holds a tensor of the host

pretend.cpp makes torch accept CUDA devices; device.py checks each operator as a GPU would, counts
it, and computes it on the host; attention.py has the fused attention kernels and cuda.py torch.cuda
and NCCL. So autograd, autocast, DDP, FSDP, fused AdamW and pinned memory work as with CUDA, and the
numbers of a run can be compared with those of a CPU. `pretend.record` has what was noticed and
counted, `pretend.why_not()` why a machine cannot do this. rehearse.py has the runs of the scripts;
the faults that they must notice are in tests/mutants.toml.

It cannot show whether real kernels agree, how they round, races between streams, NCCL, or speed.
"""

from pretend.device import DeviceFault, Gpu, build, record, why_not

__all__ = ["DeviceFault", "Gpu", "build", "install", "record", "why_not"]


def install(devices: int = 1, card: str = "H100", memory: bool = False) -> None:
    """Give this process `devices` pretended GPUs, for good.

    card: H100, or T4, which has neither bf16 nor flash attention; memory: count the bytes of all
    tensors, for torch.cuda.max_memory_allocated().
    """
    from pretend import attention, cuda, device

    device.install(devices, memory)
    attention.install(card)
    cuda.install(card)
