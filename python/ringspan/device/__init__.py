"""Attention on accelerators: our plan, our exchange and our softmax state around the accelerator's own ops.

The C++ side walks over the steps of a plan (binding/op/step_backend.h) and calls one op for each, whose kernel is found
by the tensors' device. This package has the kernels for Ascend NPUs (PyTorch's key PrivateUse1) and for CUDA GPUs.
They are in force from the import on. docs/decisions/device.md says why.
"""

from ringspan.device.cuda import CudaSteps
from ringspan.device.limits import cuda_refusal, npu_refusal
from ringspan.device.npu import NpuSteps
from ringspan.device.registry import Registration, StepRefusal, Steps, serve

__all__ = ["CudaSteps", "NpuSteps", "Registration", "StepRefusal", "Steps", "cuda_refusal", "npu_refusal", "serve"]

CUDA = serve("CUDA", CudaSteps(), cuda_refusal)
NPU = serve("PrivateUse1", NpuSteps(), npu_refusal)
