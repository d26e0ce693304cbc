"""What the autoregressive engine does differently on a CUDA device: Triton kernels, fused layers, graphs, attention backends."""
