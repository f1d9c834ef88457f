"""Private names of ``torch.distributed``'s wrappers."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from telemetry.torch_private import callers, find

# Calls between a pipeline stage's forward pass and a hook on its module or a child of it.
_MAX_FRAMES_BELOW_STAGE = 48

_PROBES_OF_STAGES = {"_forward_metadata_inference", "_shape_inference"}


def active_ddp() -> DistributedDataParallel | None:
    """Return the DDP wrapper in whose forward pass this thread is; None outside of one."""
    consequence = "all ranks measure all parameters"
    active = find(DistributedDataParallel, "_get_active_ddp_module", consequence)
    wrapper = None if active is None else active()
    return wrapper if isinstance(wrapper, DistributedDataParallel) else None


class CallingStage(NamedTuple):
    """A stage of a pipeline: its number, and whether it only infers shapes."""

    number: int
    probes: bool


def calling_stage() -> CallingStage | None:
    """Return the pipeline stage whose forward pass is on this thread's call stack; or None."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None:
        return None
    consequence = "stages of a pipeline with equal names are taken for copies of each other"
    base = find(module, "_PipelineStageBase", consequence)
    number, functions = None, set()
    for frame in () if base is None else callers(_MAX_FRAMES_BELOW_STAGE):
        if frame.f_code.co_filename == module.__file__:
            stage = frame.f_locals.get("self")
            if isinstance(stage, base):
                number = int(stage.stage_index)
                functions.add(frame.f_code.co_name)
    if number is None:
        return None
    return CallingStage(number, not _PROBES_OF_STAGES.isdisjoint(functions))


def fsdp_mesh(module: nn.Module) -> Any | None:
    """Return the device mesh over which ``fully_shard`` shards a module's parameters; or None."""
    if not _is_sharded(module):
        return None
    consequence = "dimensions of meshes are recognized by their names: dp, tp, ..."
    get_state = find(module, "_get_fsdp_state", consequence)
    group = None if get_state is None else getattr(get_state(), "_fsdp_param_group", None)
    return getattr(getattr(group, "mesh_info", None), "mesh", None)


def written_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class, without the one that ``fully_shard`` has put before it."""
    return type(module).__mro__[2] if _is_sharded(module) else type(module)


def _is_sharded(module: nn.Module) -> bool:
    # Since PyTorch 2.6.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def has_flat_shards(model: nn.Module) -> bool:
    """Whether ``FullyShardedDataParallel`` has flattened parameters, around or inside the model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and (
        any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules())
        or any(getattr(p, "_fsdp_flattened", False) for p in model.parameters())
    )


def is_dtensor(tensor: object) -> bool:
    """Whether it is a ``DTensor``, without importing its module."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def spec_of(tensor: Any) -> Any | None:
    """Return the spec of a ``DTensor``, also if DDP on a submesh made it a plain tensor."""
    return tensor._spec if is_dtensor(tensor) else getattr(tensor, "_st_info", None)


def ignored_by(wrapper: DistributedDataParallel) -> set[int]:
    """Return the ``id`` of each parameter that DDP ignores."""
    ignored = getattr(wrapper.module, "_ddp_params_and_buffers_to_ignore", ())
    return {id(wrapper.module.get_parameter(name)) for name in ignored}


def averages_weights(wrapper: DistributedDataParallel) -> bool:
    """Whether a communication hook of DDP's leaves gradients of ranks different (local SGD)."""
    consequence = "copies of parameters that local SGD averages count as diverged"
    hooks = find(wrapper, "_comm_hooks", consequence) or ()
    return any(getattr(hook, "__name__", "") == "post_localSGD_hook" for hook, _ in hooks)


def made_local(node: object) -> Any | None:
    """Return the spec of the ``DTensor`` whose ``to_local()`` made this autograd node."""
    if type(node).__name__ != "_ToTorchTensorBackward":
        return None
    return find(node, "dtensor_spec", "outputs of tensor-parallel modules are not told apart")
