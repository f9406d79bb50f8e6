"""Attention kernels. They know tiles and tables; never frames, models or presets."""
