"""Triton's interpreter, for kernels on CPUs: a process that sets TRITON_INTERPRET=1 before it imports Triton."""

from typing import Any

from triton.runtime import interpreter


def repair() -> None:
    """Triton 3.6 converts arrays of one element to int, which numpy has refused since 2.4; 3.7 does not."""
    patch = interpreter._patch_lang_tensor

    def repaired(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = repaired
