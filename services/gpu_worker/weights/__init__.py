"""Weights from safetensors folders and GGUF files, memory-mapped and checked, as what the decoder multiplies with."""
