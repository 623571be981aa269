"""Hooks into modules when they are imported: torch and Keras, to count steps, and others.

The hooks run in the thread that imports. A later registration from our thread could change torch's table of hooks while
a step iterates over it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .progress_counters import ProgressCounters

_TORCH = "torch.optim.optimizer"
# Where Keras 3, Keras 2.13 to 2.15 and tf_keras keep the class through which every batch of `fit` goes.
_KERAS = ("keras.src.callbacks.callback_list", "keras.src.callbacks", "keras.callbacks", "tf_keras.src.callbacks")


def make_framework_hooks(state: ProgressCounters) -> dict[str, Callable[[Any], None]]:
    """Return the hooks that count the steps of torch and Keras, by module."""
    keras = dict.fromkeys(_KERAS, lambda module: _hook_keras(state, module))
    return {_TORCH: lambda module: _hook_torch(state, module), **keras}


def hook_imports(state: ProgressCounters, hooks: dict[str, Callable[[Any], None]]) -> None:
    """Call each hook with its module: now if the module is imported already, else after its import."""
    for name in [name for name in hooks if name in sys.modules]:
        _apply(state, hooks.pop(name), sys.modules[name])
    sys.meta_path.insert(0, _Finder(state, hooks))


class _Finder:
    """Delegates to the other finders, and has the action run after the module was executed."""

    def __init__(self, state: ProgressCounters, actions: dict[str, Callable[[Any], None]]) -> None:
        self._state = state
        self._actions = actions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        action = self._actions.pop(name, None)
        if action is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not self else None
            if spec is not None:
                self._after_exec(spec.loader, action)
                return spec
        return None

    def _after_exec(self, loader: Any, action: Callable[[Any], None]) -> None:
        """Wrap `exec_module` of this one loader, so that the module keeps its loader."""
        original = getattr(loader, "exec_module", None)
        if original is None:
            return

        def exec_module(module: Any) -> None:
            del loader.exec_module
            original(module)
            _apply(self._state, action, module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            self._state.degraded["steps"] = f"loader of {type(loader).__name__} cannot be watched"


def _apply(state: ProgressCounters, action: Callable[[Any], None], module: Any) -> None:
    try:
        action(module)
    except Exception as error:  # the framework has changed: report that, and let the worker run
        state.degraded["steps"] = f"{module.__name__}: {type(error).__name__}: {error}"


def _hook_torch(state: ProgressCounters, module: Any) -> None:
    # In torch since 2.1; its hooks run after every `step` of every optimizer.
    module.register_optimizer_step_post_hook(state.count_optimizer_step)
    state.frameworks.append("torch")


def _hook_keras(state: ProgressCounters, module: Any) -> None:
    callbacks = getattr(module, "CallbackList", None)
    if callbacks is None or "keras" in state.frameworks:
        return
    _wrap(callbacks, "on_train_batch_end", lambda: state.count_step("keras"))
    _wrap(callbacks, "on_test_batch_end", state.count_progress)
    _wrap(callbacks, "on_predict_batch_end", state.count_progress)
    state.frameworks.append("keras")


def _wrap(owner: Any, name: str, mark: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        mark()
        return original(self, *args, **kwargs)

    counted.__name__, counted.__qualname__ = name, getattr(original, "__qualname__", name)
    counted.__doc__ = original.__doc__
    setattr(owner, name, counted)
