"""Replacing one attribute of torch by a wrapper, and putting the exact original back.

A wrapper someone else has wrapped since cannot be taken out any more; it then passes everything straight through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

from stepscope.record.agent.probes.wrapper_importlib_bootstrap import make_wrapper

if TYPE_CHECKING:
    from stepscope.record.agent.guard import Pair


class Patch:
    """`owner.name` wrapped by `wrap(original)`, until `remove`."""

    def __init__(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner = owner
        self._name = name
        self._inherited = name not in vars(owner)
        self._original = vars(owner)[name] if not self._inherited else getattr(owner, name)
        self._wrapper = wrap(self._original)
        setattr(owner, name, self._wrapper)

    def remove(self) -> bool:
        """Restore the original. False when someone else has wrapped it since, so that it must stay."""
        if vars(self._owner).get(self._name) is not self._wrapper:
            return False
        if self._inherited:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)
        return True


class PatchSet:
    """The patches of a probe. A wrapper that could not be removed goes quiet instead, and wakes up on `install`."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._stuck: list[Patch] = []
        self.enabled = False

    def install(self, make: Callable[[], None]) -> None:
        """Run `make`, which calls `around`, unless the wrappers of an earlier time are still in place."""
        self.enabled = True
        if not self._stuck:
            make()

    def around(self, owner: Any, name: str, pair: Pair) -> None:
        """Call the hooks of `pair` around `owner.name`; no-op where it does not exist."""
        if getattr(owner, name, None) is not None:
            self._patches.append(Patch(owner, name, lambda original: make_wrapper(self, original, pair)))

    def remove(self) -> None:
        """Take all wrappers out, the newest first."""
        self.enabled = False
        self._stuck.extend(patch for patch in reversed(self._patches) if not patch.remove())
        self._patches.clear()
