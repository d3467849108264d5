"""Stand-ins for packages that SGLang imports and a machine without an accelerator lacks.

They can be imported, and nothing else: every call of them raises, so that no test passes because
of a stand-in.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

_TORCHVISION = (
    *("torchvision", "torchvision.io", "torchvision.ops", "torchvision.utils"),
    *("torchvision.transforms", "torchvision.transforms.functional"),
    *("torchvision.transforms.v2", "torchvision.transforms.v2.functional"),
)
_KERNELS = ("sgl_kernel", "sgl_kernel.kvcacheio")


def install() -> None:
    """Puts them into sys.modules. SGLANG_USE_CPU_ENGINE=1 must be set, too."""
    from transformers.utils import import_utils

    # transformers must have found that torchvision is missing, before its stand-in is there.
    import_utils.is_torchvision_available()
    import_utils.is_torchvision_available = lambda: False
    sys.modules["transformers.utils"].is_torchvision_available = lambda: False  # type: ignore[attr-defined]
    _install(_TORCHVISION, lambda name: type(name, (), {}))
    _install(_KERNELS, _refusal)


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} isn't here: this machine has SGLang without its kernels")

    return refuse


def _install(names: Sequence[str], make: Callable[[str], Any]) -> None:
    for name in names:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []

        def attribute(wanted: str, make: Callable[[str], Any] = make) -> Any:
            if wanted.startswith("__"):
                raise AttributeError(wanted)
            return make(wanted)

        module.__getattr__ = attribute  # type: ignore[method-assign]
        sys.modules[name] = module
