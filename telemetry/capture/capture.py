"""Watches one model: arms hooks for the steps that are due, hands over what each step gave."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from telemetry.budget import Budget
from telemetry.capture.captured import CapturedStep, RunTotals
from telemetry.capture.costs import StepCosts
from telemetry.capture.hooks import CONVOLUTIONS
from telemetry.capture.layout import LayoutKeeper
from telemetry.capture.module_hooks import ModuleHooks
from telemetry.capture.no_step import NoStepWatch, Ran
from telemetry.capture.optimizer_hooks import OptimizerHooks
from telemetry.capture.parameters import ParameterTable
from telemetry.capture.random_state import read_random_states
from telemetry.capture.reader import Content, StepReader
from telemetry.capture.scripting import leave_modules_that_are_scripted
from telemetry.capture.silence import explain_silence
from telemetry.capture.tally import Tally
from telemetry.capture.window import Window
from telemetry.faults import Faults
from telemetry.measure import Measurer
from telemetry.schedule import Schedule
from telemetry.selection import Selection, cleaned, spread
from telemetry.torch_private import NO_TASK, backward_task, undisturbed

PICTURED_MODULES = 12
"""Convolutions whose feature maps are drawn; more are thinned evenly over the depth."""


class Capture:
    """Turns the training of one model into :class:`CapturedStep` values, one per optimizer step.

    The model is held weakly. Hooks are on its modules only during steps that ``is_due`` names; on
    all other steps the norms of the gradients are taken and nothing else is done.

    Args:
        model: The model in training.
        selection: Which of its modules are watched.
        is_due: Which steps are measured in full.
        content: What that holds.
        deliver: Called on the training thread with each finished step; must not wait.
        safe_point: Called between steps; may raise into the training loop.
        primary: Whose steps count; None: the first optimizer that steps the model's parameters.
        faults: Where hooks tell what failed.
        first_step: Number of the first step.
        budget: What this may cost, and takes note of it; None: whatever is due is done.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        selection: Selection,
        is_due: Schedule,
        content: Content,
        deliver: Callable[[CapturedStep], None],
        safe_point: Callable[[], None],
        primary: Optimizer | None,
        faults: Faults,
        first_step: int = 0,
        budget: Budget | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._selection = selection
        self._is_due = is_due
        self._content = content
        self._deliver = deliver
        self._safe_point = safe_point
        self._primary = weakref.ref(primary) if primary is not None else None
        self._faults = faults
        self._budget = budget
        self._costs = StepCosts(budget)
        self._table = ParameterTable(model)
        # Optimizers without parameters of the model, and how many parameters they had.
        self._foreign: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._layout = LayoutKeeper(model, selection, self._table)
        self._totals = RunTotals()
        self._measurer = Measurer()
        self._reader = StepReader(model, self._table, content, faults)
        self._hooks = ModuleHooks(
            model,
            faults,
            own_time=self._costs.own,
            activations=content.activations,
            activation_grads=content.activation_gradients,
            pass_begins=self._pass_begins,
            pass_ended=self._pass_ended,
        )
        self._window = Window(step=first_step, measurer=None)
        self._no_step = NoStepWatch()
        self._clock: OptimizerHooks | None = None
        self._end_scripting: Callable[[], None] | None = None
        self._thread: int | None = None
        self._by_hand = False
        self._had_phase = False
        self._first_step = first_step
        self._silence_explained = False
        self.step = first_step

    # --- attaching ---------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether hooks are in place."""
        return self._clock is not None

    def attach(self) -> None:
        """Begin to watch, from the current step on."""
        if self._clock is not None:
            return
        primary = self._primary() if self._primary is not None else None
        self._clock = OptimizerHooks(self, primary)
        self._end_scripting = leave_modules_that_are_scripted()
        self._thread = None
        self._foreign.clear()
        self._costs.restart()
        with self._costs.own:
            self._open_window(attaching=True)

    def end(self) -> None:
        """Take every hook off for good; say what was seen if that was not a single step."""
        if self._clock is not None:
            self._clock.pass_begins()  # a step may still be waiting for other optimizers
            if self.step == self._first_step and not self._had_phase:
                message, level = self._no_step.at_the_end(self._ran())
                if message is not None:
                    self._faults.tell(message, level=level)
        self.detach()

    def detach(self) -> None:
        """Take every hook off; harmless when done twice."""
        if self._clock is not None:
            self._clock.pass_begins()  # a step may still be waiting for other optimizers
            self._clock.remove()
            self._clock = None
        if self._end_scripting is not None:
            self._end_scripting()
            self._end_scripting = None
        self._hooks.remove()
        self._reader.forget()

    def _ran(self) -> Ran:
        """What is known of the forward passes of the step in progress."""
        if self._window.order:
            return "in training"
        if self._model() is None:
            return "gone"
        if not self._window.full:
            return "unknown"
        called = any(hook.ran_eagerly for hook in self._hooks.watched.values())
        return "elsewhere" if called else "never"

    # --- resuming ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where training stands, in numbers, strings, lists and dicts; call it between steps."""
        if self._clock is not None:
            self._clock.pass_begins()  # as in detach()
        order = list(self._layout.forward_order)
        return {"step": self.step, "full": self._window.full, "forward_order": order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, as far as it says; hooks must be off."""
        self.step = self._first_step = state.get("step", self.step)
        model = self._model()
        if model is not None:
            self._layout.set_forward_order(model, state.get("forward_order", ()))

    # --- the listener of the optimizers' hooks ----------------------------------------------

    def steps_parameters(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` holds parameters of the model."""
        if self._table.holds(optimizer):
            return True
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._foreign.get(optimizer) == count:
            return False
        model = self._model()  # perhaps its parameters were replaced since
        if model is not None and self._table.refresh(model) and self._table.holds(optimizer):
            return True
        self._foreign[optimizer] = count
        return False

    def other_step(self) -> None:
        """An optimizer that holds none of the parameters has stepped."""
        self._no_step.other_step()

    def before_step(self, optimizer: Optimizer) -> None:
        """Read the gradients, which are final, and what the step is about to change."""
        if not self._window.norms:
            return
        with (
            self._costs.own,
            self._faults.contained("to read the gradients"),
            undisturbed() as alone,
        ):
            if alone:
                self._refresh()
                self._reader.before_step(self._window, optimizer)

    def evaluated(self) -> None:
        """Observe no more passes in this step: a closure's further evaluations."""
        self._hooks.pause()

    def after_step(self, optimizer: Optimizer) -> None:
        """See how far the parameters have moved."""
        if not self._window.full:
            return
        with (
            self._costs.own,
            self._faults.contained("to measure the update"),
            undisturbed() as alone,
        ):
            if alone:
                self._reader.after_step(self._window, optimizer)
        self._hooks.resume()

    def all_stepped(self) -> bool:
        """Whether every parameter that has a gradient was stepped since the last step ended."""
        model = self._model()
        stepped = set(self._window.indices())
        with undisturbed():
            return model is None or all(
                index in stepped
                for index, parameter in enumerate(model.parameters())
                if parameter.grad is not None
            )

    def step_completed(self) -> None:
        """Hand the step over and prepare for the next."""
        if backward_task() == NO_TASK:
            self._thread = threading.get_ident()
        window = self._window
        with self._costs.own:
            with self._faults.contained("to hand over a step"):
                self._hooks.end()
                if window.norms:
                    self._hand_over(window)
                if window.full:
                    self._tell_silent_modules(window)
                self._hooks.uninstall()
                self._note_costs(window)
            self.step += 1
            self._open_window()

    def safe_point(self) -> None:
        """Let the logger raise between steps, if it was asked to."""
        self._safe_point()

    # --- without an optimizer, and apart from training ----------------------------------------

    def manual_step(self) -> None:
        """A step of a loop that has no ``torch.optim.Optimizer``: gradients are still there."""
        self._by_hand = True
        with (
            self._costs.own,
            self._faults.contained("to read the gradients"),
            undisturbed() as alone,
        ):
            if alone and self._window.norms:
                self._refresh()
                self._reader.step_by_hand(self._window)
        self.step_completed()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure every forward pass inside, as a phase of its own; none of them is training."""
        model = self._model()
        if model is None or not self.attached:
            yield
            return
        self._had_phase = True
        window = Window(step=self.step, measurer=Measurer(), phase=name)
        with self._faults.contained("to attach its hooks"):
            self._install_hooks(model)
        try:
            with self._hooks.phase(window):
                yield
        finally:
            with self._faults.contained("to hand over a phase"):
                if not self._window.full:
                    self._hooks.uninstall()
                self._hand_over(window)

    # --- one step ------------------------------------------------------------------------------

    def _open_window(self, *, attaching: bool = False) -> None:
        model = self._model()
        affordable = self._budget is None or self._budget.affords_full()
        full = affordable and self._is_due(self.step)
        self._reader.forget()
        self._no_step = NoStepWatch()
        self._window = Window(
            step=self.step,
            measurer=self._measurer if full else None,
            norms=full or self._budget is None or self._budget.affords_norms(),
            thread=self._thread,
        )
        if model is None:
            return
        try:
            # Hooks are there when training begins even if nothing is due: a model that is compiled
            # without them would never show anything.
            if full or attaching:
                self._install_hooks(model)
            if full:
                self._begin_window()
        except Exception:
            self._faults.report("to attach its hooks")
            self._hooks.remove()

    def _begin_window(self) -> None:
        """Begin to measure a step in full."""
        if self._budget is not None:
            modules = self._layout.current(self._model(), ()).modules
            turn = self._budget.begin_full(len(modules))
            self._window.left_out = frozenset(
                module.name for i, module in enumerate(modules) if not turn.takes(i)
            )
        with undisturbed() as alone:
            if alone:
                self._refresh()
                self._window.random_states = read_random_states()
                if self._by_hand:
                    self._reader.expect_step_by_hand(self._window)
            self._hooks.begin(self._window)

    def _refresh(self) -> None:
        """Look again whether parameters were replaced, on steps where that is cheap."""
        model = self._model()
        if model is not None and self._window.full and self._table.refresh(model):
            self._foreign.clear()

    def _install_hooks(self, model: nn.Module) -> None:
        watched = cleaned(self._selection.apply(model).items())
        convolutions = [n for n, m in watched.items() if isinstance(m, CONVOLUTIONS)]
        drawn = spread(convolutions, PICTURED_MODULES) if self._content.images else []
        self._hooks.install(watched, pictured=frozenset(drawn), input_picture=self._content.images)

    def _note_costs(self, window: Window) -> None:
        model = self._model() if self._budget is not None else None
        if model is not None:
            with undisturbed():
                device = next(model.parameters()).device
            self._costs.step_ended(window.step, full=window.full, norms=window.norms, device=device)

    def _hand_over(self, window: Window) -> None:
        layout = self._layout.current(self._model(), window.order)
        with undisturbed() if window.full else contextlib.nullcontext():
            captured = CapturedStep.of(
                window,
                wall_time=time.time(),
                layout=layout,
                totals=self._totals,
                faults=self._faults,
            )
        self._deliver(captured)

    def _pass_begins(self) -> None:
        """A training pass begins after an optimizer has stepped in this window."""
        if self._clock is not None:
            self._clock.pass_begins()

    def _pass_ended(self, window: Window, tally: Tally, parameters: Iterable[Tensor]) -> None:
        """A backward pass has reached parameters."""
        with (
            self._costs.own,
            self._faults.contained("to end a backward pass"),
            undisturbed() as alone,
        ):
            if alone:
                self._reader.end_pass(window, tally, parameters)
            message = self._no_step.backward_ended(parameters)
            if message is not None:
                self._faults.tell(message)
                self._hooks.pause()

    def _tell_silent_modules(self, window: Window) -> None:
        """Name, once, the watched modules that did not run in the first full step."""
        model = self._model()
        if self._silence_explained or model is None or not self._content.activations:
            return
        self._silence_explained = True
        explained = explain_silence(
            model,
            self._hooks.watched,
            ran=window.order,
            trained={self._table.parameters[i].module_name for i in window.indices()},
            step=window.step,
        )
        if explained is not None:
            level, message = explained
            self._faults.tell(message, level=level)
