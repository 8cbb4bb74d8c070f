"""The kernels for accelerators, in force from the import on."""

from __future__ import annotations

from ringspan.device import CudaSteps, NpuSteps, cuda_refusal, npu_refusal, serve

CUDA = serve("CUDA", CudaSteps(), cuda_refusal)
NPU = serve("PrivateUse1", NpuSteps(), npu_refusal)
