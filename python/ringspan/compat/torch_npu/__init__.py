"""`torch_npu` on CPU tensors: programs and tests that are written for Ascend NPUs run on a laptop.

    from ringspan.compat import torch_npu
    torch_npu.install()      # a no-op where the real torch_npu can be imported
    import torch_npu         # the stand-in

docs/torch_npu.md has the table of names, and what is refused.
"""

from ringspan.compat.torch_npu.installation import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
