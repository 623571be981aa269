"""Runs hooks after the import of modules: of torch and Keras to count steps, and of other modules for the recorders.

A hook runs in the thread that imports the module. If a thread of the shim registered the step hook later, torch's table
of hooks could change while a step iterates over the table.
"""

from __future__ import annotations

import sys

from .torch_names import COMPILE, COMPILE_END, COMPILE_START, OPTIMIZER, STEP_HOOK, find_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .progress_counters import ProgressCounters

# The modules of Keras 3, Keras 2.13 to 2.15 and tf_keras with the class whose methods `fit` calls for every batch.
_KERAS = ("keras.src.callbacks.callback_list", "keras.src.callbacks", "keras.callbacks", "tf_keras.src.callbacks")
FRAMEWORK_MODULES = (OPTIMIZER, *_KERAS)
"""A process that imports one of these modules trains, or helps a process that trains."""
_COMPILE_LIMIT = "15m"


def make_framework_hooks(counters: ProgressCounters) -> dict[str, Callable[[Any], None]]:
    """Return the hooks that count the steps of torch and Keras, and declare phases, by module name."""
    keras = dict.fromkeys(_KERAS, lambda module: _count_keras_steps(counters, module))
    return {OPTIMIZER: lambda _: _count_torch_steps(counters), COMPILE: lambda _: _declare_compiling(counters), **keras}


def hook_imports(counters: ProgressCounters, hooks: dict[str, Callable[[Any], None]]) -> None:
    """Call each hook with its module: at once if the module is already imported, otherwise after its import."""
    for name in [name for name in hooks if name in sys.modules]:
        _run_hook(counters, hooks.pop(name), sys.modules[name])
    sys.meta_path.insert(0, _HookingFinder(counters, hooks))


class _HookingFinder:
    """Delegates to the other finders, and runs the hook of a module after the module's code has run."""

    def __init__(self, counters: ProgressCounters, hooks: dict[str, Callable[[Any], None]]) -> None:
        self._counters = counters
        self._hooks = hooks

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        hook = self._hooks.pop(name, None)
        if hook is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not self else None
            if spec is not None:
                self._after_exec(spec.loader, hook)
                return spec
        return None

    def _after_exec(self, loader: Any, hook: Callable[[Any], None]) -> None:
        """Wrap `exec_module` of this one loader object. The module keeps its loader."""
        original = getattr(loader, "exec_module", None)
        if original is None:
            return

        def exec_module(module: Any) -> None:
            del loader.exec_module
            original(module)
            _run_hook(self._counters, hook, module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            self._counters.degraded["steps"] = f"loader of {type(loader).__name__} cannot be watched"


def _run_hook(counters: ProgressCounters, hook: Callable[[Any], None], module: Any) -> None:
    try:
        hook(module)
    except Exception as error:  # The framework has changed. Report the error and let the worker continue.
        counters.degraded["steps"] = f"{module.__name__}: {type(error).__name__}: {error}"


def _count_torch_steps(counters: ProgressCounters) -> None:
    # Its hooks run after every `step` of every optimizer.
    find_name(STEP_HOOK)(counters.count_optimizer_step)
    counters.frameworks.append("torch")


def _declare_compiling(counters: ProgressCounters) -> None:
    """Let each run of `torch.compile` be a phase: compilers may work for minutes without a visible sign.

    torch calls the second function once for each call of the first, but also if the program has removed the first one,
    or if a function of the program has failed before it.
    """
    begin, end = find_name(COMPILE_START), find_name(COMPILE_END)
    phases: list[tuple[str, float, float]] = []
    if begin is not None and end is not None:
        begin(lambda *_: phases.append(counters.begin_phase("torch.compile", _COMPILE_LIMIT)))
        end(lambda *_: counters.end_phase(phases.pop()) if phases else None)


def _count_keras_steps(counters: ProgressCounters, module: Any) -> None:
    callbacks = getattr(module, "CallbackList", None)
    if callbacks is None or "keras" in counters.frameworks:
        return
    _wrap(callbacks, "on_train_batch_end", lambda: counters.count_step("keras"))
    _wrap(callbacks, "on_test_batch_end", counters.count_progress)
    _wrap(callbacks, "on_predict_batch_end", counters.count_progress)
    counters.frameworks.append("keras")


def _wrap(owner: Any, name: str, count: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        count()
        return original(self, *args, **kwargs)

    counted.__name__, counted.__qualname__ = name, getattr(original, "__qualname__", name)
    counted.__doc__ = original.__doc__
    setattr(owner, name, counted)
