"""Says why watched modules were not seen running."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from telemetry.torch_private import graphs_compiled

_NAMED_AT_MOST = 8

_WAYS_OUT = (
    "make HookLogger before the first compiled call, or call torch._dynamo.reset_code_caches() "
    "once after making it, or train the logged steps under "
    'torch.compiler.set_stance("force_eager")'
)


def explain_silence(
    *, silent: Sequence[str], watched: int, trained: Collection[str], step: int
) -> str:
    """What to tell the user about watched modules that did not run in a fully measured step.

    Args:
        silent: Their names, at least one.
        watched: How many modules are watched.
        trained: Names of all modules with a parameter that got a gradient in that step.
        step: Its number.
    """
    # Something was compiled, and a module that was not seen running took part in the step.
    compiled = graphs_compiled() > 0 and any(name in trained for name in silent)
    if len(silent) < watched:
        message = (
            f"{len(silent)} of {watched} watched modules did not run at step {step}, nothing is "
            f"logged for their outputs: {_listed(silent)}"
        )
        cause = f"If they were compiled before HookLogger was made, {_WAYS_OUT}"
        return f"{message}. {cause}" if compiled else message
    message = f"no watched module was seen running at step {step}, so activations are missing"
    if compiled:
        return f"{message}. The model was probably compiled before HookLogger was made: {_WAYS_OUT}"
    return (
        f"{message}. The model was probably not in training mode, or ran without gradients or on "
        "another thread"
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(name or "the model" for name in names[:_NAMED_AT_MOST])
    more = len(names) - _NAMED_AT_MOST
    return f"{shown} and {more} more" if more > 0 else shown
