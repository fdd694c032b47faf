"""How a model is cut among processes: the plans of scratch, which fit the modules of both packages and of torch.nn.

They leave ``nn.MultiheadAttention`` whole, ``out_proj`` included: see trap `out_proj_not_sharded`.
"""

from scratch.parallel import TensorParallelPlan, tensor_parallel_plan

__all__ = ["TensorParallelPlan", "tensor_parallel_plan"]
