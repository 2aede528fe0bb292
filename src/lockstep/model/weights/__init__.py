"""Weights in and out: safetensors directories, GGUF files, filling a decoder from either; packed ones on disk."""

from lockstep.model.weights.fill import Part, Stored, fill
from lockstep.model.weights.gguf_file import read_gguf
from lockstep.model.weights.packed import PackedCache
from lockstep.model.weights.safetensors_dir import read_safetensors, write_safetensors

__all__ = ["PackedCache", "Part", "Stored", "fill", "read_gguf", "read_safetensors", "write_safetensors"]
