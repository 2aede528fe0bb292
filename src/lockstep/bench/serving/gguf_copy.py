"""A GGUF file with the same weights in another type: what llama.cpp is given for an even comparison."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def copy_as_f16(source: Path, target: Path) -> None:
    """Write source's metadata and tensors to target, matrices in float16, vectors in float32 (as llama.cpp wants)."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize

    reader = GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    partial = target.with_suffix(".partial")
    writer = GGUFWriter(partial, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, inner)
    writer.add_file_type(1)  # mostly float16
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            values = np.asarray(tensor.data)
        writer.add_tensor(tensor.name, values.astype(np.float16 if len(tensor.shape) > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(target)
